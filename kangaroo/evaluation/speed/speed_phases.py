"""Where the time of a step goes: its phases beside the fewest bytes that each must read.

A vanilla token, a draft token and verifications of several widths, at one context and batch 1.
Phases are timed by themselves, one after the other and over again; `host` is what a whole step of
the engine takes beyond them: masks, bookkeeping, the interpreter.

Shapes: N nodes, D hidden size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from kangaroo.drafters.chain import confidence
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling, pick
from kangaroo.engine.tree import Tree
from kangaroo.evaluation.speed.bandwidth import Reads, median_seconds
from kangaroo.models.target import LM

REPEATS = 31
WIDTHS = [*range(1, 9), 12, 16, 32, 64]


@torch.no_grad()
def phases(lm: LM, drafter: Kangaroo, prompt: list[int], bandwidth: float) -> dict[str, Any]:
    """Milliseconds of each phase and of the whole, with the limit of each.

    Args:
        prompt: the context, less than the model's by a few hundred tokens.
        bandwidth: bytes a second, which the limits are computed by.

    Returns `steps` (one a kind of step: phases, limits, whole), `verification` (milliseconds by
    its tokens) and `cost`, a draft token's time over a vanilla token's.
    """
    vanilla, kangaroo = _whole_steps(lm, drafter, prompt)
    timer = PhaseTimer(lm, drafter, len(prompt))
    reads = Reads.of(lm, drafter.adapter, drafter.head.size)
    layers, shallow, length = range(lm.n_layers), drafter.shallow, len(prompt)
    deep, width = range(drafter.exit_layer, lm.n_layers), drafter.steps + 1
    kv, head = reads.kv * length, reads.norm + reads.head
    vanilla_token = {
        "embed": (timer.embed(), reads.row),
        "layers": (timer.layers(layers, 1), reads.shallow + reads.deep + lm.n_layers * kv),
        "head": (timer.head(1), head),
        "sampling": (timer.sampling(1), 0),
    }
    draft_token = {
        "embed": (timer.embed(), reads.row),
        "layers": (timer.layers(shallow, 1), reads.shallow + len(shallow) * kv),
        "adapter": (timer.adapter(), reads.adapter + kv),
        "head": (timer.draft_head(), reads.draft_head),
        "sampling": (timer.draft_sampling(), 0),
    }
    verification = {
        "layers": (timer.layers(deep, width), reads.verify(length, drafter.steps) - head),
        "head": (timer.head(width), head),
        "sampling": (timer.sampling(width), 0),
    }
    steps = {
        "vanilla token": _step(vanilla_token, vanilla, bandwidth),
        "draft token": _step(draft_token, kangaroo, bandwidth),
        f"verification of {width}": _step(verification, None, bandwidth),
    }
    of_widths = [
        {"tokens": n, "ms": timer.layers(deep, n) + timer.head(n) + timer.sampling(n)}
        for n in WIDTHS
    ]
    cost = steps["draft token"]["ms"] / steps["vanilla token"]["ms"]
    return {"context": length, "steps": steps, "verification": of_widths, "cost": cost}


def _step(
    parts: dict[str, tuple[float, int]], whole: float | None, bandwidth: float
) -> dict[str, Any]:
    """Phases in milliseconds and their limits; `host` makes up for the rest of the whole."""
    took = {name: ms for name, (ms, _) in parts.items()}
    limits = {name: 1e3 * read / bandwidth for name, (_, read) in parts.items()}
    if whole is not None:
        took["host"], limits["host"] = whole - sum(took.values()), 0.0
    total, limit = sum(took.values()), sum(limits.values())
    return {
        "phases": took,
        "limits": limits,
        "ms": total,
        "limit_ms": limit,
        "over_limit": total / limit,
    }


class PhaseTimer:
    """Times single phases over and over; milliseconds, the median."""

    def __init__(self, lm: LM, drafter: Kangaroo, length: int):
        self.lm, self.drafter, self.length = lm, drafter, length
        self.n_slots = length + max(WIDTHS) + 2 * drafter.max_nodes
        self.cache = lm.new_cache(1, self.n_slots)
        self.own_cache = lm.cache_like(1, self.n_slots, [lm.device] * drafter.adapter.depth)
        self.generator = torch.Generator(lm.device).manual_seed(0)

    def median(self, work: Callable[[], Any]) -> float:
        """Milliseconds of a phase, by the median of many."""
        return 1e3 * median_seconds(work, self.lm.device, REPEATS)

    def states(self, width: int) -> torch.Tensor:
        """Hidden states `[1, N, D]`, any."""
        shape = (1, width, self.lm.config.hidden_size)
        return torch.randn(shape, generator=self.generator, device=self.lm.device).to(self.lm.dtype)

    def block(self, width: int) -> Any:
        """Where so many tokens after the context lie."""
        start_B = torch.tensor([self.length - 1], device=self.lm.device)
        tree = Tree.chain(width, self.lm.device)
        return self.lm.block(tree, start_B, self.length + width, self.n_slots)

    def embed(self) -> float:
        """Of one token's embedding."""
        token_11 = torch.zeros(1, 1, dtype=torch.long, device=self.lm.device)
        return self.median(lambda: self.lm.embed(token_11))

    def layers(self, layers: range, width: int) -> float:
        """Of some of the target's layers on so many tokens."""
        x_1ND, block = self.states(width), self.block(width)
        return self.median(lambda: self.lm.run(x_1ND, self.cache, block, layers))

    def head(self, width: int) -> float:
        """Of the target's norm and head on so many tokens."""
        x_1ND = self.states(width)
        return self.median(lambda: self.lm.logits(x_1ND))

    def sampling(self, width: int) -> float:
        """Of the target's choice after so many tokens."""
        logits_1NV, at = self.lm.logits(self.states(width)), self.block(width).positions_RT
        seeds_B = torch.zeros(1, dtype=torch.long, device=self.lm.device)
        return self.median(lambda: pick(logits_1NV, at, Sampling(), seeds_B))

    def adapter(self) -> float:
        """Of the drafter's layer on one token."""
        f_1ND, block = self.states(1), self.block(1)
        deep_1ND = self.states(1) if self.drafter.reads_deep else None
        past = self.own_cache.at(block)
        return self.median(lambda: self.drafter.adapter(f_1ND, deep_1ND, block, past))

    def draft_head(self) -> float:
        """Of the head that drafts."""
        x_1D = self.states(1)[0]
        return self.median(lambda: self.drafter.head(x_1D))

    def draft_sampling(self) -> float:
        """The draft's token, and whether to draft a further one."""
        logits_1K = self.drafter.head(self.states(1)[0])

        def choose() -> None:
            self.drafter.head.token_of(logits_1K.argmax(-1, keepdim=True))
            confidence(logits_1K).tolist()

        return self.median(choose)


def _whole_steps(lm: LM, drafter: Kangaroo, prompt: list[int]) -> tuple[float, float]:
    """Milliseconds of a vanilla step, and of each draft token of a round that never stops early."""
    steady = Kangaroo(lm, drafter.adapter, drafter.steps, 0, drafter.head)
    vanilla, kangaroo = [], []
    engines = Engine(lm, Vanilla()), Engine(lm, steady)
    batches = []
    rounds = min(REPEATS, (lm.context - len(prompt)) // (drafter.steps + 1) - 1)
    for engine in engines:
        new_tokens = 1 + rounds * (drafter.steps + 1)  # the first by the prefill
        batch = engine.open(1, len(prompt) + new_tokens, Sampling())
        engine.admit(batch, 0, Request(prompt, new_tokens, ignore_eos=True))
        batches.append(batch)
    for _ in range(rounds):
        (record,) = engines[0].step(batches[0])
        vanilla.append(record.seconds)
        (record,) = engines[1].step(batches[1])
        # the pending token passes the shallow layers too, before anything is drafted
        kangaroo.append(record.draft_seconds * drafter.steps / (drafter.steps + 1) / record.drafted)
    return 1e3 * statistics.median(vanilla), 1e3 * statistics.median(kangaroo)
