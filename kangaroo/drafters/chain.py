"""Drafting a chain token by token: what Kangaroo, EAGLE, draft models and skipped layers share.

Shapes: B rows, N nodes, W window, V vocabulary, K draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kangaroo.batch import Batch
from kangaroo.cache import Block
from kangaroo.model import LM
from kangaroo.sampling import Rule, Sampling, warp
from kangaroo.tree import Draft, Tree


@dataclass
class Token:
    """One more token of every row's chain.

    Args:
        id_B1: itself.
        logits_BK: what it was chosen by.
    """

    id_B1: Tensor
    logits_BK: Tensor


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
    """

    lm: LM
    steps: int
    threshold: float
    draft_cost: float
    window: int

    @abstractmethod
    def tokens(self, batch: Batch, block: Block) -> Iterator[Token]:
        """The chain, one token after another; the caller may stop before the last.

        Args:
            block: of the window, the pending token and `steps` draft tokens.
        """

    def spread(self, logits_BK: Tensor) -> Tensor:
        """The same logits over the target's vocabulary, `[B, V]`."""
        return logits_BK

    def finish(self, draft: Draft, block: Block) -> Draft:
        """The draft as it is verified, with what was computed of its nodes already.

        Args:
            block: of its nodes, for the model that drafts.
        """
        return draft

    def propose(self, batch: Batch) -> Draft:
        """A chain below each row's pending token, as long as the budget of a batch allows."""
        least = batch.budget.min_chain_chances(batch.active, self.steps, self.draft_cost)
        if least[0] >= 1:
            return Draft.nothing(batch.last(1))
        stops = self.threshold > 0 or any(least)
        # where each text has sampling of its own, none is accepted by rejection
        alike = batch.sampling if isinstance(batch.sampling, Sampling) else Sampling()
        rejection = alike.rule is Rule.rejection and not alike.greedy
        pending_B1, active_B1 = batch.last(1), ~batch.done_B[:, None]
        block = chain_block(self.lm, batch, self.window, self.steps)
        ids, valid, probs = [pending_B1], [torch.ones_like(active_B1)], []
        chance_B1 = torch.ones_like(pending_B1, dtype=torch.float32)
        for token in self.tokens(batch, block):
            ids.append(token.id_B1)
            valid.append(active_B1)
            if rejection:
                logits_B1V = self.spread(token.logits_BK)[:, None]
                probs.append(warp(logits_B1V, alike).softmax(-1))
            if stops and len(ids) <= self.steps:
                confidence_B1 = confidence(token.logits_BK)
                chance_B1 = chance_B1 * confidence_B1
                goes_on_B1 = (confidence_B1 > self.threshold) & (chance_B1 > least[len(ids) - 1])
                active_B1 = active_B1 & goes_on_B1
                if not active_B1.any():  # the one sync a drafted token that stopping costs
                    break
        draft = Draft(
            tokens_BN=torch.cat(ids, 1),
            tree=Tree.chain(len(ids), batch.length_B.device),
            valid_BN=torch.cat(valid, 1),
            probs_BNV=torch.cat([torch.zeros_like(probs[0]), *probs], 1) if probs else None,
        )
        return self.finish(draft, block.narrow(self.window, len(ids)))


def chain_block(lm: LM, batch: Batch, window: int, steps: int, room: int | None = None) -> Block:
    """One block for a round: the window, the pending token, `steps` more.

    Args:
        room: how many nodes there will be after the pending token; None is `steps`.
    """
    tree = Tree.chain(window + 1 + steps, batch.length_B.device)
    below = 0 if min(batch.lengths) > window else window
    used = batch.used + (steps if room is None else room)
    return lm.block(tree, batch.base_B - window, used, batch.n_slots, below)


def confidence(logits_BK: Tensor) -> Tensor:
    """The top-1 probability `[B, 1]`, read before temperature and filters."""
    return logits_BK.float().softmax(-1).amax(-1, keepdim=True)
