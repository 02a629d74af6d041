"""Drafting a chain token by token: what Kangaroo, EAGLE, draft models and skipped layers share.

Shapes: B rows, N nodes, W window, V vocabulary, K draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta
from kangaroo.engine.sampling import Rule, Sampling, warp
from kangaroo.engine.tree import Draft, Tree
from kangaroo.models.target import TargetModel


@dataclass
class Token:
    """One more token of every row's chain.

    Args:
        id_B1: itself.
        logits_BK: what it was chosen by; no number where kernels chose it and write none.
        reading: what the host reads of it, as `Kangaroo.reading` says: the confidence `[B]`, if
            nothing else.
    """

    id_B1: Tensor
    logits_BK: Tensor
    reading: Tensor


class Chain(ABC):
    """Drafts until every row's confidence has fallen to the threshold, or `steps` tokens.

    Confidence is the top-1 probability, before temperature and filters; the token whose confidence
    was low is still verified.

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
    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[Token]:
        """The chain, one token after another; the caller may stop before the last.

        Args:
            meta: of the window, the pending token and `steps` draft tokens.
        """

    def spread(self, logits_BK: Tensor) -> Tensor:
        """The same logits over the target's vocabulary, `[B, V]`."""
        return logits_BK

    def finish(self, draft: Draft, meta: ForwardMeta) -> Draft:
        """The draft as it is verified, with what was computed of its nodes already.

        Args:
            meta: of its nodes, for the model that drafts.
        """
        return draft

    def propose(self, batch: Batch) -> Draft:
        """A chain below each row's pending token, as long as the budget of a batch allows."""
        least = batch.budget.min_chain_chances(batch.active, self.steps, self.draft_cost)
        if least[0] >= 1:
            return Draft.nothing(batch.last(1))
        # where each text has sampling of its own, none is accepted by rejection
        alike = batch.sampling if isinstance(batch.sampling, Sampling) else Sampling()
        rejection = alike.rule is Rule.rejection and not alike.greedy
        meta = chain_meta(self.lm, batch, self.window, self.steps)
        # on the host, which reads one number a row and token where chains may stop
        active, lengths = ~np.array(batch.done), np.zeros(batch.size, np.int64)
        limits, chance = (
            np.array([self.threshold, *least], np.float32),
            np.ones(batch.size, np.float32),
        )
        ids, probs = [batch.last(1)], []
        for token in self.tokens(batch, meta):
            ids.append(token.id_B1)
            lengths += active
            if rejection:
                logits_B1V = self.spread(token.logits_BK)[:, None]
                probs.append(warp(logits_B1V, alike).softmax(-1))
            if limits.any() and len(ids) <= self.steps:
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
