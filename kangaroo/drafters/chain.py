"""Drafting a chain token by token: what Kangaroo, EAGLE, draft models and skipped layers share.

Shapes: B rows, N nodes, D hidden size, V vocabulary, K draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta
from kangaroo.engine.sampling import AnySampling, Rule, Sampling, of_round, pick, warp
from kangaroo.engine.tree import Draft, Tree
from kangaroo.models.target import TargetModel


class DraftToken(NamedTuple):
    """One more token of every row's chain.

    Args:
        id_B1: itself.
        logits_BK: what it was chosen by; no number where kernels chose it and write none.
        reading: what the host reads of it (`Chain.reading`).
    """

    id_B1: Tensor
    logits_BK: Tensor
    reading: Tensor


class Chain(ABC):
    """Drafts until every row's confidence has fallen to the threshold, or `steps` tokens.

    The token whose confidence was low is still verified.

    Attributes:
        lm: the model that drafts, or the target where its layers draft.
        steps: at most this many draft tokens a round.
        threshold: 0 never stops early.
        draft_cost: of a token of the chain, in vanilla steps.
        window: committed tokens before the pending one that a round's first pass takes again.
        reads_logits: whether greedy decoding takes more from them than the likeliest token.
    """

    lm: TargetModel
    steps: int
    threshold: float
    draft_cost: float
    window: int
    reads_logits = False

    @abstractmethod
    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[DraftToken]:
        """The chain, one token after another; the caller may stop before the last.

        Args:
            meta: of the window, the pending token and `steps` draft tokens.
        """

    @abstractmethod
    def choose(self, x_B1D: Tensor) -> tuple[Tensor, Tensor] | None:
        """The likeliest token after a state and its chance, both `[B, 1]`; None without kernels."""

    @abstractmethod
    def logits(self, x_B1D: Tensor) -> Tensor:
        """Over the draft vocabulary, `[B, K]`."""

    def spread(self, logits_BK: Tensor) -> Tensor:
        """The same logits over the target's vocabulary, `[B, V]`."""
        return logits_BK

    def draw(
        self,
        batch: Batch,
        step: int,
        x_B1D: Tensor,
        length_B: Tensor,
        seeds_B: Tensor,
        settings_B3: Tensor,
    ) -> DraftToken:
        """The chain's token number `step`, from the state that the head reads.

        Args:
            length_B, seeds_B, settings_B3: `Batch.draws`.
        """
        choice = self.choose(x_B1D) if batch.sampling.greedy and not self.reads_logits else None
        if choice is not None:
            return DraftToken(choice[0], x_B1D.new_empty(0), choice[1][:, 0])
        if batch.sampling.rule is Rule.block:  # what is accepted depends on tokens drafted after it
            seeds_B = of_round(seeds_B, length_B)
        logits_BK = self.logits(x_B1D)
        draws = batch.sampling.reading(settings_B3), length_B[:, None] + step - 1, seeds_B
        return DraftToken(self.pick(logits_BK, *draws), logits_BK, self.reading(logits_BK, *draws))

    def pick(
        self, logits_BK: Tensor, sampling: AnySampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """The token that the target would choose from these logits, `[B, 1]`."""
        return pick(self.spread(logits_BK)[:, None], positions_B1, sampling, seeds_B)

    def reading(
        self, logits_BK: Tensor, sampling: AnySampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """What the host reads of a token: the confidence `[B]`, if nothing else."""
        return confidence(logits_BK)

    def finish(self, draft: Draft, meta: ForwardMeta) -> Draft:
        """The draft as it is verified, with what was computed of its nodes already.

        Args:
            meta: of its nodes, for the model that drafts.
        """
        return draft

    def propose(self, batch: Batch) -> Draft:
        """A chain below each row's pending token, as long as the budget of a batch allows."""
        min_chances = batch.budget.min_chain_chances(batch.active, self.steps, self.draft_cost)
        if min_chances[0] >= 1:
            return Draft.nothing(batch.last(1))
        # where each text has sampling of its own, all are accepted by matching
        alike = batch.sampling if isinstance(batch.sampling, Sampling) else Sampling()
        keeps_probs = alike.rule is not Rule.match and not alike.greedy
        meta = chain_meta(self.lm, batch, self.window, self.steps)
        # on the host, which reads one number a row and token where chains may stop
        active, lengths = ~np.array(batch.done), np.zeros(batch.size, np.int64)
        limits = np.array([self.threshold, *min_chances], np.float32)
        chance = np.ones(batch.size, np.float32)
        ids, probs = [batch.last(1)], []
        for token in self.tokens(batch, meta):
            ids.append(token.id_B1)
            lengths += active
            if keeps_probs:
                logits_B1V = self.spread(token.logits_BK)[:, None]
                probs.append(warp(logits_B1V, alike).softmax(-1))
            if limits.any() and len(ids) <= self.steps:  # Kangaroo's section 3.2
                confidence = np.array(token.reading.tolist(), np.float32)
                chance *= confidence
                active &= (confidence > limits[0]) & (chance > limits[len(ids)])
                if not active.any():
                    break
        padding = self.lm.acceleration.width(len(ids), self.steps + 1) - len(ids)
        ids += ids[-1:] * padding
        probs += probs[-1:] * padding
        lengths_B1 = torch.from_numpy(lengths[:, None]).to(batch.length_B.device)
        draft = Draft(
            tokens_BN=torch.cat(ids, 1),
            tree=Tree.chain(len(ids), batch.length_B.device),
            valid_BN=torch.arange(len(ids), device=lengths_B1.device) <= lengths_B1,
            probs_BNV=torch.cat([torch.zeros_like(probs[0]), *probs], 1) if probs else None,
        )
        return self.finish(draft, meta.narrow(self.window, len(ids)))


def chain_meta(
    lm: TargetModel, batch: Batch, window: int, steps: int, room: int | None = None
) -> ForwardMeta:
    """One block for a round: the window, the pending token, `steps` more.

    Args:
        room: how many nodes there will be after the pending token; None is `steps`.
    """
    tree = Tree.chain(window + 1 + steps, batch.length_B.device)
    below = 0 if min(batch.lengths) > window else window
    used = batch.used + (steps if room is None else room)
    return lm.forward_meta(
        tree, batch.base_B - window, used, batch.n_slots, below, ("draft", batch.cache)
    )


def confidence(logits_BK: Tensor) -> Tensor:
    """The top-1 probability `[B]`, read before temperature and filters."""
    return logits_BK.float().softmax(-1).amax(-1)
