"""Drafting a chain token by token: what Kangaroo, EAGLE, draft models and skipped layers share.

Shapes: B rows, D hidden size, V vocabulary, K draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kangaroo.drafters.base import EarlyStopping
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, Tensors
from kangaroo.engine.sampling import BatchSampling, Rule, pick, warp
from kangaroo.engine.tree import Draft, Tree
from kangaroo.engine.verify import draft_seeds
from kangaroo.heads.draft_head import DraftHead


class DraftToken(NamedTuple):
    """One more token of every row's chain, its logits (none by kernels), and what the host reads of
    it."""

    id_B1: Tensor
    logits_BK: Tensor
    reading: Tensor


class Chain(EarlyStopping):
    """Drafts until every row's confidence has fallen to the threshold, or `steps` tokens; with
    `threshold=auto` until one more would no longer pay (`Budget.limits`). The token whose
    confidence was low is still verified.

    Attributes:
        reads_logits: whether greedy decoding takes more from logits than the likeliest token.
    """

    head: DraftHead
    reads_logits = False

    def draft(self, batch: Batch, limits: np.ndarray) -> Draft:
        active = limits[:, 0] < 1
        may_stop, sampling = self.threshold > 0 or limits[active].any(), batch.sampling
        keeps_probs = sampling.rule is not Rule.match and not sampling.greedy
        meta = self.chain_meta(batch, self.steps, self.steps)
        # on the host, which reads one number a row and token where chains may stop
        lengths, chance = np.zeros(batch.size, np.int64), np.ones(batch.size, np.float32)
        ids, probs = [batch.last(1)], []
        for token in self.tokens(batch, meta):
            ids.append(token.id_B1)
            lengths += active
            if keeps_probs:
                logits_B1V = self.head.spread(token.logits_BK)[:, None]
                probs.append(warp(logits_B1V, sampling).softmax(-1))
            if may_stop and len(ids) <= self.steps:  # Kangaroo's section 3.2
                confidence = np.array(token.reading.tolist(), np.float32)
                chance *= confidence
                active &= confidence > np.float32(self.threshold)
                active &= chance > limits[:, len(ids) - 1]
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

    @abstractmethod
    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[DraftToken]:
        """The chain, one token after another; the caller may stop before the last. `meta` is of
        the window, the pending token and `steps` draft tokens."""

    def draw(self, batch: Batch, step: int, x_B1D: Tensor, draws: Tensors) -> DraftToken:
        """The chain's token number `step`, from the state that the head reads, by `Batch.draws`."""
        x_BD, by_choice = x_B1D[:, 0], batch.sampling.greedy and not self.reads_logits
        if by_choice and (choice := self.head.choose(x_BD)) is not None:
            return DraftToken(choice[0], x_BD.new_empty(0), choice[1][:, 0])
        return self.draw_from(batch, step, self.head(x_BD), draws)

    def draw_from(self, batch: Batch, step: int, logits_BK: Tensor, draws: Tensors) -> DraftToken:
        """The same from its logits over the draft vocabulary."""
        length_B, seeds_B, settings_B3 = draws
        if batch.sampling.rule is Rule.block:  # what is accepted depends on tokens drafted after it
            seeds_B = draft_seeds(seeds_B, length_B)
        sampling, at_B1 = batch.sampling.reading(settings_B3), length_B[:, None] + step - 1
        if sampling.greedy:  # without spreading them
            id_B1 = self.head.token_of(logits_BK.argmax(-1, keepdim=True))
        else:
            id_B1 = pick(self.head.spread(logits_BK)[:, None], at_B1, sampling, seeds_B)
        return DraftToken(id_B1, logits_BK, self.reading(logits_BK, sampling, at_B1, seeds_B))

    def reading(
        self, logits_BK: Tensor, sampling: BatchSampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """What the host reads of a token: the confidence `[B]`, before temperature and filters, if
        nothing else."""
        return logits_BK.float().softmax(-1).amax(-1)

    def finish(self, draft: Draft, meta: ForwardMeta) -> Draft:
        """The draft as it is verified, with what was computed of its nodes already, and where."""
        return draft
