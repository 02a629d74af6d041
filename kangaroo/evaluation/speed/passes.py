"""What passes of the target read, how fast the memory is read, and rows decoded together."""

import logging
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.clock import now
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils import memory

log = logging.getLogger(__name__)

WARM_UP, REPEATS = 2, 15
CACHES = 0.8  # of the memory that is free; the rest is for what a pass computes


class Reads:
    """Bytes that rounds of decoding read, everything once a forward: vanilla, or with an adapter
    and the head that it drafts with. Of the embedding table that is one row a token, unless the
    head is tied to it."""

    def __init__(
        self, lm: TargetModel, adapter: Layer | None = None, draft_head: DraftHead | None = None
    ):
        self.exit_layer = 0 if adapter is None else adapter.exit_layer
        self.n_layers, self.kv = lm.n_layers, lm.new_cache(1, 1, [lm.device]).bytes()
        self.shallow = memory.weights(*lm.layers[: self.exit_layer])
        self.deep = memory.weights(*lm.layers[self.exit_layer :])
        table, head = lm.hf.model.embed_tokens.weight, memory.weights(lm.head)
        self.head = memory.weights(lm.hf.model.norm) + head
        self.draft_head = sum(x.nbytes for x in draft_head.weights) if draft_head else head
        self.row = table.shape[1] * table.element_size()
        parts = [] if adapter is None else adapter.named_children()
        # a head of its own counts as the draft head, which it is
        self.adapter = memory.weights(*(module for name, module in parts if name != "head"))
        self.adapter_depth = 0 if adapter is None else adapter.depth

    def draft(self, length: int, drafted: int) -> int:
        """Of drafting after `length` tokens: the pending token passes the shallow layers too."""
        below, keys_below = self.row + self.shallow, self.exit_layer * self.kv
        beside, keys_beside = self.adapter + self.draft_head, self.adapter_depth * self.kv
        shallow = sum(below + keys_below * (length + i) for i in range(drafted + 1))
        return shallow + sum(beside + keys_beside * (length + i) for i in range(drafted))

    def verify(self, length: int, drafted: int) -> int:
        """Of the one forward through the layers above the exit that ends a round."""
        above = self.n_layers - self.exit_layer
        return self.deep + self.head + above * self.kv * (length + drafted)

    def round(self, length: int, drafted: int) -> int:
        """Of a draft of so many tokens and its verification."""
        return self.draft(length, drafted) + self.verify(length, drafted)


def memory_bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes a second in reading a buffer of so many 2**20 bytes in order, as weights are."""
    source, seconds = torch.ones(megabytes * 2**17, dtype=torch.int64, device=device), []
    for _ in range(WARM_UP + REPEATS):
        start = now(device)
        source.sum()
        seconds.append(now(device) - start)
    return source.nbytes / statistics.median(seconds[WARM_UP:])


def throughput(
    lm: TargetModel,
    drafter: Kangaroo,
    prompts: Sequence[list[int]],
    new_tokens: int,
    sizes: Sequence[int],
) -> list[dict[str, Any]]:
    """Tokens a second by vanilla and Kangaroo at every batch size whose cache fits."""
    results = []
    token = lm.n_layers * lm.new_cache(1, 1, [lm.device]).bytes()
    row = token * (max(map(len, prompts)) + new_tokens)
    for size in sizes:
        if size * row > CACHES * memory.free(lm.device):
            log.warning("batch %d is left out: its cache would take %d bytes", size, size * row)
            continue
        texts = [prompts[i % len(prompts)] for i in range(size)]
        vanilla, kangaroo = (
            tokens_per_second(Engine(lm, each), texts, new_tokens) for each in (Vanilla(), drafter)
        )
        rates = {"vanilla": vanilla, "kangaroo": kangaroo, "ratio": kangaroo / vanilla}
        results.append({"batch": size} | rates)
    return results


def tokens_per_second(engine: Engine, texts: Sequence[list[int]], new_tokens: int) -> float:
    """Of decoding texts together, past any EOS, until the first is complete."""
    device, longest = engine.lm.device, max(map(len, texts)) + new_tokens
    batch = engine.open(len(texts), longest, Sampling())
    for row, text in enumerate(texts):
        engine.admit(batch, row, Request(text, new_tokens, ignore_eos=True))
    written, start = 0, now(device)
    while not any(batch.done):
        written += sum(len(record.tokens) for record in engine.step(batch))
    return written / (now(device) - start)
