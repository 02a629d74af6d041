"""Records the CUDA graphs that decoding will replay, before anybody waits for them."""

import logging
import time
from itertools import product

import torch

from kangaroo.engine.cache import MIN_RECORDED
from kangaroo.engine.engine import Engine
from kangaroo.engine.prefill import MIN_CHUNK
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling

LONGEST = 1 << 14  # tokens of the longest prompt
SHORT = 128  # tokens of the prompts in other rows, and of answers
STEPS = 6  # of each batch: drafts have several lengths
SAMPLINGS = Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9)

log = logging.getLogger(__name__)


def warm_up(engine: Engine, rows: int, longest: int) -> None:
    """Decode a few steps of random texts in `rows` rows: one text and all, greedy and sampled, with
    short prompts and a longer one for each extent up to `longest`. Other graphs are recorded when
    they are first used. The cache is kept for the next session."""
    if not engine.lm.backend.records or longest < 2:
        return
    start = time.perf_counter()
    most = min(longest, LONGEST) - 1
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(engine.lm.config.vocab_size, (size,), generator=generator).tolist()
        for size in (most, *[min(most, SHORT)] * (rows - 1))
    ]
    extents = [MIN_RECORDED << i for i in range(most.bit_length())]
    widths = [MIN_CHUNK, 2 * MIN_CHUNK, *extents]  # prompts are recorded in chunks, too
    lengths = [1, *(width + 1 for width in widths if width + 1 < most)]
    session = engine.open(rows, longest, Sampling())
    for length, sampling, active in product(lengths, SAMPLINGS, sorted({1, rows})):
        for row, text in enumerate(texts[:active]):
            prompt = text[:length]
            limit = min(longest - len(prompt), SHORT)
            session.admit(row, Request(prompt, limit, sampling=sampling, ignore_eos=True))
        for number in range(STEPS + 1):
            if not all(session.batch.done):
                session.step(drafts=number < STEPS)
        for row in range(active):
            session.batch.stop(row)
    log.info("graphs for %d rows recorded in %.0f s", rows, time.perf_counter() - start)
