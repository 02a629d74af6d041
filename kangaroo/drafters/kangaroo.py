"""Kangaroo: the target's shallow layers and a small adapter draft a chain until confidence falls.

Shapes: B rows, N draft nodes, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kangaroo.adapter import Adapter, DraftHead
from kangaroo.batch import Batch
from kangaroo.cache import Block
from kangaroo.drafters.early_exit import EarlyExit, EarlyExitConfig, started
from kangaroo.model import LM
from kangaroo.sampling import Rule, Sampling, pick, warp
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
        at = block.narrow(0, window + 1).to(hidden[0].device)
        f_BND = torch.cat([self.shallow_BWD, hidden[0]], 1)
        deep_BND = self.deep_BUD * started(at) if self.fused else None
        for step in range(1, steps + 1):
            below_at = block.narrow(window + step, 1)
            token_B1, logits_BK, adapted_B1D, f_B1D = self._draft(
                batch, step, f_BND, deep_BND, at, below_at
            )
            tokens.append(token_B1)
            valid.append(active_B1)
            hidden.append(f_B1D)
            if rejection:
                logits_B1V = self.head.spread(logits_BK)[:, None]
                probs.append(warp(logits_B1V, batch.sampling).softmax(-1))
            f_BND, at = f_B1D, below_at.to(f_B1D.device)
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

    def _draft(
        self, batch: Batch, step: int, f_BND: Tensor, deep_BND: Tensor | None, at: Block,
        below: Block,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """One draft token: itself, its logits, and the states that the next one starts from.

        Args:
            at: where the adapter's input lies; its last token is the one before.
            below: where the new token passes the shallow layers.
        """

        def work(
            f_BND: Tensor, seeds_B: Tensor, positions_B1: Tensor, *rest: Tensor
        ) -> tuple[Tensor, ...]:
            here, there = at.with_tensors(*rest[:5]), below.with_tensors(*rest[5:10])
            deep_BND = rest[10] if self.fused else None
            adapted_B1D = self.adapter(f_BND, deep_BND, here, self.cache.at(here))[:, -1:]
            logits_BK = self.head(adapted_B1D[:, 0])
            token_B1 = self._pick(logits_BK, batch.sampling, positions_B1, seeds_B)
            return token_B1, logits_BK, adapted_B1D, self._shallow(token_B1, batch, there)

        positions_B1 = batch.length_B[:, None] + step - 1
        tensors = (*at.tensors(), *below.tensors(), *(() if deep_BND is None else (deep_BND,)))
        inputs = (f_BND, batch.seeds_B, positions_B1, *tensors)
        if self.lm.graphs is None or not self.lm.graphs.take(f_BND, at):
            token_B1, logits_BK, adapted_B1D, f_B1D = work(*inputs)
        else:
            key = (id(batch.cache), id(self), f_BND.shape, at.extent, repr(batch.sampling))
            token_B1, logits_BK, adapted_B1D, f_B1D = self.lm.graphs(key, work, *inputs)
        return token_B1, logits_BK, adapted_B1D, f_B1D

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
