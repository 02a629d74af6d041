"""The time of a verification by its number of tokens, measured once on the machine that decodes;
and on a GPU that of drafting a token.

While reading the weights takes the time, more tokens are nearly free: the read hides their
arithmetic. How much it hides depends, on a virtual CPU, on the machine's other users, so half of
what was hidden is counted (docs/methods.md); on a GPU nothing is.

Shapes: N tokens of a pass.
"""

import hashlib
import json
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor

from kangaroo.engine.cache import BUCKET, ForwardMeta, KVCache
from kangaroo.engine.clock import now
from kangaroo.engine.tree import Tree
from kangaroo.models.target import TargetModel
from kangaroo.utils.folders import cache_folder, write_json
from kangaroo.utils.memory import weight_bytes

log = logging.getLogger(__name__)

WIDTHS = [1, 2, 4, 8, 12, 16, 32, 64, 128]
CONTEXT = 256  # tokens
ROUND = 16  # tokens after which a measured text repeats itself
REPEATS = 30  # passes of a width,
MOST_SECONDS = 0.5  # but none after this time
KEPT_SECONDS = 86400.0  # after this time a stored measurement is repeated: other users come and go
# The machine is busy, and what was measured is not stored, if times differ by more than this
# factor, or if other processes took more than this share of all processors.
STEADY = 1.1
OTHERS = 0.1

Work = Callable[[Tensor, ForwardMeta], Tensor]  # a pass over the states of its tokens


@dataclass(frozen=True)
class VerifyCosts:
    """Seconds of a pass through the whole target by its number of tokens, both ascending. Of the
    arithmetic that reading memory hides, the share `shown` counts."""

    widths: list[int]
    seconds: list[float]
    shown: float

    def at(self, tokens: int) -> float:
        """The measured time, interpolated between widths and extrapolated beyond the last."""
        i = min(bisect_left(self.widths, tokens, 1), len(self.widths) - 1)
        low, high = self.widths[i - 1 : i + 1]
        below, above = self.seconds[i - 1 : i + 1]
        return below + (above - below) * (tokens - low) / (high - low)

    def expected(self, tokens: int) -> float:
        """The measured time, plus the share `shown` of the arithmetic that memory hid."""
        first, last = self.widths[-2:]
        per_token = (self.at(last) - self.at(first)) / (last - first)
        unhidden = self.at(1) + (tokens - 1) * per_token
        return self.at(tokens) + self.shown * max(0.0, unhidden - self.at(tokens))

    def curve(self, rows: int, nodes: int) -> list[float]:
        """The cost of verifying 0 to `nodes` nodes in each of `rows` rows, in vanilla steps."""
        vanilla = self.expected(rows)
        return [self.expected(rows * (1 + n)) / vanilla for n in range(nodes + 1)]


_verify_costs: WeakKeyDictionary[TargetModel, VerifyCosts] = WeakKeyDictionary()


def verify_costs(lm: TargetModel) -> VerifyCosts:
    """The costs of this target on its device with torch's current threads, measured or read from
    the cache folder, where they stay for a day unless the machine was busy."""
    if lm in _verify_costs:
        return _verify_costs[lm]
    # the bytes tell packed weights from widened ones
    model = [lm.config.to_json_string(), str(lm.dtype), weight_bytes(lm.hf)]
    identity = [*model, *lm.backend.machine(lm.device)]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    file = cache_folder() / "costs" / f"{key}.json"
    with suppress(OSError, ValueError, TypeError):  # it is missing or incomplete
        if time.time() - file.stat().st_mtime < KEPT_SECONDS:
            return _verify_costs.setdefault(lm, VerifyCosts(**json.loads(file.read_text())))
    costs, steady = measure(lm)
    try:
        if steady:
            write_json(file, asdict(costs))
        else:
            log.info("the machine is busy: verification is measured again in the next process")
    except OSError as error:
        log.warning("verification is measured again in the next process: %s", error)
    return _verify_costs.setdefault(lm, costs)


def measure(lm: TargetModel) -> tuple[VerifyCosts, bool]:
    """The fastest pass of each width, and whether the machine was at rest meanwhile."""
    widths = [width for width in WIDTHS if context(lm) + width <= lm.context]
    start = time.monotonic()
    before = seconds_of_others()
    passes = verifications(lm, widths, range(lm.n_layers), context(lm)).values()
    others = seconds_of_others() - before
    processors = (psutil.cpu_count() or 1) * (time.monotonic() - start)
    seconds = list(accumulate(map(min, passes), max))
    on_gpu = lm.device.type == "cuda"
    costs = VerifyCosts(widths, seconds, shown=0.0 if on_gpu else 0.5)
    alone = on_gpu or others < OTHERS * processors
    return costs, alone and all(map(is_steady, passes))


def seconds_of_others() -> float:
    """How long processors worked for other processes, and other virtual machines, until now."""
    times = psutil.cpu_times()
    working = [getattr(times, name, 0.0) for name in ("user", "nice", "system", "steal")]
    return sum(working) - time.process_time()


@torch.inference_mode()
def verifications(
    lm: TargetModel, widths: list[int], layers: range, length: int
) -> dict[int, list[float]]:
    """Seconds of passes by width, ascending: layers, head and choice, after `length` tokens. The
    text repeats itself, so that the next token is sure, as mostly in a real text: a head in fewer
    bits (`cpu/cpp/sampling.h`) reads the rows of all tokens that may be the likeliest again."""
    cache = lm.new_cache(1, length + widths[-1] + BUCKET)
    for start in range(0, length, CONTEXT):
        x_1ND, meta = circle(lm, start, min(CONTEXT, length - start), cache)
        lm.run(x_1ND, cache, meta, layers)

    def verify(x_1ND: Tensor, meta: ForwardMeta) -> Tensor:
        x_1ND, _ = lm.run(x_1ND, cache, meta, layers)
        return lm.likeliest(x_1ND)

    return timed(lm, widths, length, (cache,), verify)


def is_steady(times: list[float]) -> bool:
    """Whether the fastest passes of both halves took about the same time."""
    half = len(times) // 2
    fastest = [min(part) for part in (times[:half], times[half:]) if part]
    return max(fastest) < STEADY * min(fastest)


def context(lm: TargetModel) -> int:
    """The number of tokens before a measured pass."""
    return min(CONTEXT, lm.context // 2)


def timed(
    lm: TargetModel, widths: list[int], length: int, caches: Sequence[KVCache], work: Work
) -> dict[int, list[float]]:
    """Seconds of each pass `work(x, meta)`, by width, after `length` tokens. Widths take turns."""
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(REPEATS):
        for width in [width for width in widths if sum(seconds[width]) <= MOST_SECONDS]:
            x_1ND, meta = circle(lm, length, width, caches[0])
            start = now(lm.device)
            lm.backend.replay(caches, ("cost",), work, x_1ND, meta)
            seconds[width].append(now(lm.device) - start)
    return seconds


def circle(lm: TargetModel, start: int, count: int, cache: KVCache) -> tuple[Tensor, ForwardMeta]:
    """A chain of a text that repeats itself, from position `start` on: embeddings and block."""
    tokens_1N = torch.arange(start, start + count, device=lm.device)[None] % ROUND
    chain = Tree.chain(count, lm.device)
    meta = lm.forward_meta(
        chain, torch.full_like(tokens_1N[:, 0], start), start + count, cache.n_slots
    )
    return lm.embed(tokens_1N), meta
