"""What several tokens at a time take: verifications by their width, and rows decoded together.

Shapes: N nodes, D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.clock import now
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling, pick
from kangaroo.engine.tree import Tree
from kangaroo.evaluation.speed.bandwidth import median_seconds
from kangaroo.models.target import TargetModel
from kangaroo.utils import memory

log = logging.getLogger(__name__)

REPEATS = 31
WIDTHS = [*range(1, 9), 12, 16, 32, 64]
CACHES = 0.8  # of the memory that is free; the rest is for what a pass computes


@torch.no_grad()
def verifications(lm: TargetModel, exit_layer: int, length: int) -> dict[int, float]:
    """Seconds of the layers above the exit, the head and the choices, after a context of so many
    tokens, by the number of tokens in the pass.
    """
    layers, n_slots = range(exit_layer, lm.n_layers), length + max(WIDTHS)
    cache, generator = lm.new_cache(1, n_slots), torch.Generator(lm.device).manual_seed(0)
    start_B = torch.tensor([length - 1], device=lm.device)
    seeds_B = torch.zeros(1, dtype=torch.long, device=lm.device)
    seconds = {}
    for width in WIDTHS:
        shape = (1, width, lm.config.hidden_size)
        x_1ND = torch.randn(shape, generator=generator, device=lm.device).to(lm.dtype)
        meta = lm.forward_meta(Tree.chain(width, lm.device), start_B, length + width, n_slots)

        def verify(x_1ND: torch.Tensor = x_1ND, meta: Any = meta) -> None:
            deep_1ND, _ = lm.run(x_1ND, cache, meta, layers)
            pick(lm.logits(deep_1ND), meta.positions_RT, Sampling(), seeds_B)

        seconds[width] = median_seconds(verify, lm.device, REPEATS)
    return seconds


def throughput(
    lm: TargetModel,
    drafter: Kangaroo,
    prompts: Sequence[list[int]],
    new_tokens: int,
    sizes: Sequence[int],
) -> list[dict[str, Any]]:
    """Tokens a second of decoding by vanilla and Kangaroo at every batch size, on the same texts,
    two a row. A text that is complete is replaced at once, so that the batch stays full. Sizes
    whose cache would not fit the device's memory are left out, with a warning.
    """
    results = []
    token = lm.n_layers * lm.cache_like(1, 1, [lm.device]).bytes()
    row = token * (max(map(len, prompts)) + new_tokens)
    for size in sizes:
        if size * row > CACHES * memory.free(lm.device):
            log.warning("batch %d is left out: its cache would take %d bytes", size, size * row)
            continue
        texts = [prompts[i % len(prompts)] for i in range(2 * size)]
        vanilla, kangaroo = (
            tokens_per_second(Engine(lm, each), texts, new_tokens, size)
            for each in (Vanilla(), drafter)
        )
        rates = {"vanilla": vanilla, "kangaroo": kangaroo, "ratio": kangaroo / vanilla}
        results.append({"batch": size} | rates)
    return results


def tokens_per_second(
    engine: Engine, texts: Sequence[list[int]], new_tokens: int, size: int
) -> float:
    """Of decoding at one batch size, past any EOS."""
    device = engine.lm.device
    batch = engine.open(size, max(map(len, texts)) + new_tokens, Sampling())
    waiting = [Request(text, new_tokens, ignore_eos=True) for text in reversed(texts)]
    left = [0] * size
    written, seconds = 0, 0.0
    while waiting or any(left):
        for row in range(size):
            if not left[row] and waiting:
                first = engine.admit(batch, row, waiting.pop())
                left[row] = new_tokens - len(first.tokens)
        start = now(device)
        records = engine.step(batch)
        took = now(device) - start
        full = all(left)
        for row, record in enumerate(records):
            left[row] -= len(record.tokens)
            written += len(record.tokens) * full
        seconds += took * full  # the last rows, decoding nearly alone, say nothing of this size
    return written / seconds
