"""Tokens a second over the number of rows decoded at a time, and where speculation stops paying."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.clock import now
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.models.target import LM
from kangaroo.utils import memory

log = logging.getLogger(__name__)
CACHES = 0.8  # of the memory that is free; the rest is for what a pass computes


def throughput(
    lm: LM, drafter: Kangaroo, prompts: Sequence[list[int]], new_tokens: int, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Vanilla and Kangaroo at every batch size, on the same texts: prompts in turn, two a row.

    Only decoding is timed: prompts are in the cache before. A text that is complete is replaced at
    once, so the batch stays full until as many texts as twice its rows have been begun. Sizes whose
    cache would not fit the device's memory are left out, with a warning.
    """
    rows = []
    of_token = lm.n_layers * lm.cache_like(1, 1, [lm.device]).bytes()
    of_row = of_token * (max(map(len, prompts)) + new_tokens)
    for size in sizes:
        if size * of_row > CACHES * memory.free(lm.device):
            log.warning("batch %d is left out: its cache would take %d bytes", size, size * of_row)
            continue
        texts = [prompts[i % len(prompts)] for i in range(2 * size)]
        vanilla = tokens_per_second(lm, Vanilla(), texts, new_tokens, size)
        kangaroo = tokens_per_second(lm, drafter, texts, new_tokens, size)
        rows.append(
            {"batch": size, "vanilla": vanilla, "kangaroo": kangaroo, "ratio": kangaroo / vanilla}
        )
    return rows


def tokens_per_second(
    lm: LM, drafter: Drafter, texts: Sequence[list[int]], new_tokens: int, size: int
) -> float:
    """Of one drafter at one batch size, past any EOS."""
    engine = Engine(lm, drafter)
    batch = engine.open(size, max(map(len, texts)) + new_tokens, Sampling())
    waiting = [Request(text, new_tokens, ignore_eos=True) for text in reversed(texts)]
    left = [0] * size
    written, seconds = 0, 0.0
    while waiting or any(left):
        for row in range(size):
            if not left[row] and waiting:
                first = engine.admit(batch, row, waiting.pop())
                left[row] = new_tokens - len(first.tokens)
        start = now(lm.device)
        records = engine.step(batch)
        took = now(lm.device) - start
        full = all(left)
        for row, record in enumerate(records):
            left[row] -= len(record.tokens)
            written += len(record.tokens) * full
        seconds += took * full  # the last rows, decoding nearly alone, say nothing of this size
    return written / seconds


def stops_paying(rows: Sequence[dict[str, Any]]) -> int | None:
    """The smallest batch from which on Kangaroo is no faster; None where it always is."""
    slower = None
    for row in reversed(rows):
        if row["ratio"] > 1:
            break
        slower = row["batch"]
    return slower
