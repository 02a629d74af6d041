"""The memory-bandwidth limit: what a memory delivers, and the fewest bytes that decoding must read.

At batch 1 a forward reads every weight for a handful of tokens, so the time to read them bounds the
speed from above, whatever the arithmetic.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from kangaroo.engine.clock import now
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.memory import weights


class Reads:
    """Bytes that rounds of decoding read, everything once a forward: vanilla, or with an adapter
    that drafts from a vocabulary of that size; None is the whole one. Of the embedding table that
    is one row a token, unless the head is tied to it.
    """

    def __init__(
        self, lm: TargetModel, adapter: Layer | None = None, vocabulary: int | None = None
    ):
        self.exit_layer = 0 if adapter is None else adapter.exit_layer
        self.n_layers, self.kv = lm.n_layers, lm.cache_like(1, 1, [lm.device]).bytes()
        self.shallow = weights(*lm.layers[: self.exit_layer])
        self.deep = weights(*lm.layers[self.exit_layer :])
        table, head = lm.hf.model.embed_tokens.weight, weights(lm.head)
        self.head = weights(lm.hf.model.norm) + head
        self.draft_head = head if vocabulary is None else head * vocabulary // len(table)
        self.row = table.shape[1] * table.element_size()
        parts = [] if adapter is None else adapter.named_children()
        # a head of its own counts as the draft head, which it is
        self.adapter = weights(*(module for name, module in parts if name != "head"))
        self.adapter_depth = 0 if adapter is None else adapter.depth

    def draft(self, length: int, drafted: int) -> int:
        """Of the drafting in one round: the pending token and each draft token pass the shallow
        layers, and each draft token comes from a pass of the adapter and the head.

        Args:
            length: committed tokens, the pending one included.
            drafted: draft tokens; 0 for vanilla, which reads the pending token's embedding alone.
        """
        below, keys_below = self.row + self.shallow, self.exit_layer * self.kv
        beside, keys_beside = self.adapter + self.draft_head, self.adapter_depth * self.kv
        shallow = sum(below + keys_below * (length + i) for i in range(drafted + 1))
        return shallow + sum(beside + keys_beside * (length + i) for i in range(drafted))

    def verify(self, length: int, drafted: int) -> int:
        """Of the one forward through the layers above the exit that ends a round."""
        above = self.n_layers - self.exit_layer
        return self.deep + self.head + above * self.kv * (length + drafted)

    def round(self, length: int, drafted: int) -> int:
        """Of a draft of so many tokens and its verification, after `length` tokens."""
        return self.draft(length, drafted) + self.verify(length, drafted)


def memory_bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes a second, the median of several passes that read a buffer in order, as weights are; it
    has so many times 2**20 bytes, far more than the last-level cache.
    """
    source = torch.ones(megabytes * 2**20 // 8, dtype=torch.int64, device=device)
    return source.nbytes / median_seconds(source.sum, device, repeats=15)


def median_seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Of one call, after two that warm up; the device is waited for after each, as a step's is."""
    seconds = []
    for _ in range(repeats + 2):
        start = now(device)
        work()
        seconds.append(now(device) - start)
    return statistics.median(seconds[2:])
