"""The memory-bandwidth limit: what a memory delivers, and the fewest bytes that decoding must read.

At batch 1 a forward reads every weight for a handful of tokens, so the time to read them bounds the
speed from above, whatever the arithmetic.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kangaroo.engine.clock import now
from kangaroo.heads.layer import Layer
from kangaroo.models.target import LM
from kangaroo.utils.memory import weights

REPEATS = 15


@dataclass(frozen=True)
class Reads:
    """Sizes in bytes of what a forward reads; each is read once a forward, if at all.

    Args:
        shallow, deep: the weights of the target's layers below and above the exit.
        norm, head: the target's final norm and LM head.
        draft_head: the part of the head that a draft token reads.
        row: one token's row of the embedding table. The rest of the table is not read, unless the
            head is tied to it, and then it is the head.
        adapter: the adapter's weights.
        adapter_depth: of how many layers it has keys and values.
        kv: the keys and values of one token in one layer.
        exit_layer: 0 for vanilla decoding, to which all layers are deep.
        n_layers: of the target.
    """

    shallow: int
    deep: int
    norm: int
    head: int
    draft_head: int
    row: int
    adapter: int
    adapter_depth: int
    kv: int
    exit_layer: int
    n_layers: int

    @staticmethod
    def of(lm: LM, adapter: Layer | None = None, vocabulary: int | None = None) -> Reads:
        """Of decoding with an adapter, or vanilla.

        Args:
            vocabulary: size of the draft vocabulary; None is the whole one.
        """
        exit_layer = 0 if adapter is None else adapter.exit_layer
        parts = [] if adapter is None else adapter.named_children()
        table, head = lm.hf.model.embed_tokens.weight, weights(lm.head)
        return Reads(
            shallow=weights(*lm.layers[:exit_layer]),
            deep=weights(*lm.layers[exit_layer:]),
            norm=weights(lm.hf.model.norm),
            head=head,
            draft_head=head if vocabulary is None else head * vocabulary // len(table),
            row=table.shape[1] * table.element_size(),
            # a head of its own counts as the draft head, which it is
            adapter=weights(*(module for name, module in parts if name != "head")),
            adapter_depth=0 if adapter is None else adapter.depth,
            kv=lm.cache_like(1, 1, [lm.device]).bytes(),
            exit_layer=exit_layer,
            n_layers=lm.n_layers,
        )

    def draft(self, length: int, drafted: int) -> int:
        """Of the drafting in one round: the pending token and each draft token pass the shallow
        layers, and each draft token comes from a pass of the adapter and the head.

        Args:
            length: committed tokens, the pending one included.
            drafted: draft tokens; 0 for vanilla, which reads the pending token's embedding alone.
        """
        below = self.row + self.shallow
        shallow = sum(below + self.exit_layer * self.kv * (length + i) for i in range(drafted + 1))
        own, keys = self.adapter + self.draft_head, self.adapter_depth * self.kv
        return shallow + sum(own + keys * (length + i) for i in range(drafted))

    def verify(self, length: int, drafted: int) -> int:
        """Of the one forward through the layers above the exit that ends a round."""
        above = self.n_layers - self.exit_layer
        return self.deep + self.norm + self.head + above * self.kv * (length + drafted)

    def round(self, length: int, drafted: int) -> int:
        """Of a draft of so many tokens and its verification, after `length` tokens."""
        return self.draft(length, drafted) + self.verify(length, drafted)


def memory_bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes a second, the median of several passes that read a buffer in order, as weights are.

    Args:
        megabytes: size of the buffer (2**20 bytes); far more than the last-level cache, and enough
            to take milliseconds.
    """
    source = torch.ones(megabytes * 2**20 // 8, dtype=torch.int64, device=device)
    return source.numel() * source.element_size() / median_seconds(source.sum, device, REPEATS)


def median_seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Of one call, after two that warm up; the device is waited for after each, as a step's is.

    `torch.utils.benchmark` would wait once for many calls, and knows no clock that stands still
    while graphs are recorded.
    """
    seconds = []
    for _ in range(repeats + 2):
        start = now(device)
        work()
        seconds.append(now(device) - start)
    return statistics.median(seconds[2:])
