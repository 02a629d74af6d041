"""Kangaroo: the target's shallow layers and a small adapter draft a chain until confidence falls.

Shapes: B rows, N draft nodes, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kangaroo.batch import Batch
from kangaroo.cache import Block
from kangaroo.drafters.early_exit import EarlyExit, EarlyExitConfig, started
from kangaroo.model import LM
from kangaroo.sampling import Rule, Sampling, pick, warp
from kangaroo.trained.adapter import Adapter, DraftHead
from kangaroo.tree import Draft, Tree


@dataclass
class KangarooConfig(EarlyExitConfig):
    """Chain drafting with early stopping (arXiv 2404.18911, sections 3.1 and 3.2); confidence is
    the top-1 probability.
    """

    name: str = "kangaroo"

    def build(self, lm: LM) -> Kangaroo:
        """Errors: those of `load`."""
        adapter, head = self.load(lm)
        return Kangaroo(lm, adapter, self.steps, self.threshold, head)


@dataclass
class Round:
    """What all steps of a round read.

    Args:
        block: of the window, the pending token and the drafts.
    """

    length_B: Tensor
    seeds_B: Tensor
    block: Block

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.length_B, self.seeds_B, *self.block.tensors())


class Kangaroo(EarlyExit):
    """Drafts a chain."""

    def __init__(
        self, lm: LM, adapter: Adapter, steps: int = 6, threshold: float = 0.6,
        head: DraftHead | None = None,
    ):  # fmt: skip
        super().__init__(lm, adapter, steps, threshold, head)

    def propose(self, batch: Batch) -> Draft:
        """Draft until every row's confidence has fallen to the threshold, or `steps` tokens."""
        rejection = batch.sampling.rule is Rule.rejection and not batch.sampling.greedy
        window, steps = self.window, self.steps
        pending_B1, active_B1 = batch.last(1), ~batch.done_B[:, None]
        # one block for the round: the window, the pending token, the drafts
        tree = Tree.chain(window + 1 + steps, batch.length_B.device)
        below = 0 if min(batch.lengths) > window else window
        block = self.lm.block(tree, batch.base_B - window, batch.used + steps, batch.n_slots, below)
        tokens, valid, probs = [pending_B1], [torch.ones_like(active_B1)], []
        hidden = [self._shallow(pending_B1, batch, block.narrow(window, 1))]
        f_BND = torch.cat([self.shallow_BWD, hidden[0]], 1)
        first = block.narrow(0, window + 1).to(f_BND.device)
        deep_BND = self.deep_BUD * started(first) if self.fused else None
        round_ = self._round(batch, block)
        for step in range(1, steps + 1):
            token_B1, logits_BK, adapted_B1D, f_BND = self._draft(
                batch, step, f_BND, deep_BND, round_
            )
            tokens.append(token_B1)
            valid.append(active_B1)
            hidden.append(f_BND)
            if rejection:
                logits_B1V = self.head.spread(logits_BK)[:, None]
                probs.append(warp(logits_B1V, batch.sampling).softmax(-1))
            deep_BND = adapted_B1D if self.fused else None
            if self.threshold > 0 and step < steps:
                active_B1 = active_B1 & (confidence(logits_BK) > self.threshold)
                if not active_B1.any():  # the one sync a drafted token that a threshold costs
                    break
        self.proposed = Draft(
            tokens_BN=torch.cat(tokens, 1),
            tree=Tree.chain(len(tokens), batch.length_B.device),
            valid_BN=torch.cat(valid, 1),
            hidden_BND=torch.cat(hidden, 1),
            entry=self.exit_layer,
            probs_BNV=torch.cat([torch.zeros_like(probs[0]), *probs], 1) if probs else None,
            block=block.narrow(window, len(tokens)),
        )
        return self.proposed

    def _round(self, batch: Batch, block: Block) -> Round:
        """What all steps of a round read; where they are recorded, it stays in one place."""
        tensors = (batch.length_B, batch.seeds_B, *block.tensors())
        if self.lm.graphs is not None and self.lm.graphs.take(self.shallow_BWD, block):
            tensors = self.lm.graphs.hold((batch.cache, self.cache), ("round",), *tensors)
        length_B, seeds_B, *rest = tensors
        return Round(length_B, seeds_B, block.with_tensors(*rest))

    def _draft(
        self, batch: Batch, step: int, f_BND: Tensor, deep_BND: Tensor | None, round_: Round
    ) -> tuple[Tensor, ...]:
        """One draft token `[B, 1]`, its logits `[B, K]`, and the states that the next one starts
        from, `[B, 1, D]` each: adapted, and shallow.
        """

        def work(f_BND: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            length_B, seeds_B, *rest = tensors
            block = round_.block.with_tensors(*rest[:5])
            deep_BND = rest[5] if self.fused else None
            after = self.window + step
            at = block.narrow(0, after) if step == 1 else block.narrow(after - 1, 1)
            at = at.to(f_BND.device)
            adapted_B1D = self.adapter(f_BND, deep_BND, at, self.cache.at(at))[:, -1:]
            logits_BK = self.head(adapted_B1D[:, 0])
            positions_B1 = length_B[:, None] + step - 1
            token_B1 = self._pick(logits_BK, batch.sampling, positions_B1, seeds_B)
            f_B1D = self._shallow(token_B1, batch, block.narrow(after, 1))
            return token_B1, logits_BK, adapted_B1D, f_B1D

        inputs = (f_BND, *round_.tensors(), *(() if deep_BND is None else (deep_BND,)))
        if self.lm.graphs is None or not self.lm.graphs.take(f_BND, round_.block):
            return work(*inputs)
        # a graph a step, so that none overwrites what the round still reads of another
        key = ("draft", step, repr(replace(batch.sampling, seed=0)))
        return self.lm.graphs((batch.cache, self.cache), key, work, *inputs)

    def _pick(
        self, logits_BK: Tensor, sampling: Sampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """The token that the target would choose from these logits, `[B, 1]`."""
        if sampling.greedy:
            return self.head.token_of(logits_BK.argmax(-1, keepdim=True))
        return pick(self.head.spread(logits_BK)[:, None], positions_B1, sampling, seeds_B)


def confidence(logits_BK: Tensor) -> Tensor:
    """The top-1 probability `[B, 1]`, read before temperature and filters."""
    return logits_BK.float().softmax(-1).amax(-1, keepdim=True)
