"""Drafting until one more step would not pay, and chains: for Kangaroo, EAGLE and draft models.

Shapes: B rows, N draft nodes, D hidden size, V vocabulary, K draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kangaroo.drafters.base import Drafter
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, Tensors
from kangaroo.engine.sampling import BatchSampling, Rule, pick, warp
from kangaroo.engine.tree import Draft, Tree
from kangaroo.engine.verify import draft_seeds
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel


class EarlyStopping(Drafter):
    """Drafts step by step, at most `steps`, until another step would not pay.

    Attributes:
        lm: the model that drafts: another one, or the target if its layers draft.
        proposed: the round's draft, until it is observed.
        threshold: the confidence at which a draft stops; at 0 none does.
        auto: whether the budget stops drafts.
        draft_cost: the cost of a draft token, in vanilla steps.
        window: how many committed tokens before the pending one a round's first pass reads again.
    """

    draft_cost: float
    window: int

    def __init__(self, lm: TargetModel, steps: int, threshold: float | str):
        self.lm = lm
        self.steps = steps
        self.max_nodes = steps
        self.auto = self.needs_costs = isinstance(threshold, str)
        self.threshold = 0.0 if isinstance(threshold, str) else threshold
        self.proposed: Draft | None = None

    @abstractmethod
    def draft(self, batch: Batch, limits: np.ndarray) -> Draft:
        """A draft below each row's pending token; by its `limits` one row or more may draft."""

    def propose(self, batch: Batch) -> Draft:
        limits = self.limits(batch, batch.active)
        self.proposed = self.draft(batch, limits) if (limits[:, 0] < 1).any() else None
        return self.proposed or Draft.nothing(batch.last(1))

    def limits(self, batch: Batch, rows: Sequence[int], share: float = 1.0) -> np.ndarray:
        """`Budget.limits` of these rows, `[B, steps]`, and 1, which nothing exceeds, for others. A
        token costs this `share` of `draft_cost`."""
        limits = np.ones((batch.size, self.steps), np.float32)
        limits[rows] = batch.budget.limits(rows, self.steps, share * self.draft_cost, self.auto)
        return limits

    def chain_meta(
        self, batch: Batch, steps: int, room: int, path_B: Tensor | None = None
    ) -> ForwardMeta:
        """The block of a chain: the window, the pending token and `steps` draft tokens. It needs
        `room` slots from the pending token on; the root of an accepted path is at `path_B`."""
        return self.lm.forward_meta(
            Tree.chain(self.window + 1 + steps, batch.length_B.device),
            (batch.base_B if path_B is None else path_B) - self.window,
            used=batch.used + room,
            n_slots=batch.n_slots,
            below=0 if min(batch.lengths) > self.window else self.window,
            recorded=("draft" if path_B is None else "path", batch.cache),
        )

    def path_meta(self, batch: Batch, draft: Draft) -> ForwardMeta:
        """The block of an accepted path, after the window, for a cache that lacks its tokens."""
        assert draft.meta is not None
        depth = draft.tree.max_depth
        return self.chain_meta(batch, depth, depth + 1, path_B=draft.meta.slots_RT[:, 0])


class DraftToken(NamedTuple):
    """The next token of each row's chain, its logits (none from kernels), and `Chain.reading`."""

    id_B1: Tensor
    logits_BK: Tensor
    reading: Tensor


class Chain(EarlyStopping):
    """Drafts at most `steps` tokens, until every row's confidence has fallen to the threshold; with
    `auto` until another token would not pay (`Budget.limits`). The last token is verified, too."""

    head: DraftHead
    keeps_probs = True
    reads_logits = False  # whether greedy decoding needs more of the logits than the best token

    def draft(self, batch: Batch, limits: np.ndarray) -> Draft:
        return self.grow(batch, limits, self.threshold > 0 or bool(limits[limits[:, 0] < 1].any()))

    def grow(self, batch: Batch, limits: np.ndarray | Tensor, may_stop: bool) -> Draft:
        """The draft by these limits; without `may_stop` no chain stops early. If limits are on the
        host, it reads one number of each row and token, and the draft ends with its last chain.
        Otherwise nothing waits for the host, and the backend may skip what nobody needs."""
        sampling = batch.sampling
        is_drawn = sampling.rule is not Rule.match and not sampling.greedy
        meta = self.chain_meta(batch, self.steps, self.steps)
        active: Any = limits[:, 0] < 1  # an array or a tensor, as the limits are
        lengths: Any = 0
        chance: Any = 1.0
        ids = [batch.last(1)]
        probs = []
        for token in self.tokens(batch, meta):
            ids.append(token.id_B1)
            lengths = lengths + active
            if is_drawn:
                probs.append(warp(self.head.spread(token.logits_BK)[:, None], sampling).softmax(-1))
            if may_stop and len(ids) <= self.steps:  # Kangaroo's section 3.2
                confidence: Any = token.reading
                if isinstance(limits, np.ndarray):
                    confidence = np.array(confidence.tolist(), np.float32)
                chance = chance * confidence
                active = active & (confidence > self.threshold) & (chance > limits[:, len(ids) - 1])
                if isinstance(active, Tensor):
                    self.lm.backend.skip_unless(active)
                elif not active.any():
                    break
        padding = self.lm.backend.width(len(ids), self.steps + 1) - len(ids)
        ids += ids[-1:] * padding
        probs += probs[-1:] * padding
        tokens_BN = torch.cat(ids, 1)
        valid_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        if may_stop or not active.all():  # else nothing comes from the host
            lengths_B1 = torch.as_tensor(lengths, device=tokens_BN.device)[:, None]
            valid_BN = torch.arange(len(ids), device=tokens_BN.device) <= lengths_B1
        draft = Draft(
            tokens_BN=tokens_BN,
            tree=Tree.chain(len(ids), tokens_BN.device),
            valid_BN=valid_BN,
            probs_BNV=torch.cat([torch.zeros_like(probs[0]), *probs], 1) if probs else None,
        )
        return self.finish(draft, meta.narrow(self.window, len(ids)))

    @abstractmethod
    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[DraftToken]:
        """The tokens of the chain in order; the caller may stop before the last. `meta` is the
        block of the window, the pending token and `steps` draft tokens."""

    def draw(self, batch: Batch, step: int, x_B1D: Tensor, draws: Tensors) -> DraftToken:
        """The chain's token number `step`, by the head's input and `Batch.draws`."""
        x_BD = x_B1D[:, 0]
        if batch.sampling.greedy and not self.reads_logits:
            choice = self.head.choose(x_BD)
            if choice is not None:
                return DraftToken(choice[0], x_BD.new_empty(0), choice[1][:, 0])
        return self.draw_from(batch, step, self.head(x_BD), draws)

    def draw_from(self, batch: Batch, step: int, logits_BK: Tensor, draws: Tensors) -> DraftToken:
        """The chain's token number `step`, by logits over the draft vocabulary."""
        length_B, seeds_B, settings_B3 = draws
        if batch.sampling.rule is Rule.block:  # acceptance depends on later draft tokens
            seeds_B = draft_seeds(seeds_B, length_B)
        sampling = batch.sampling.reading(settings_B3)
        positions_B1 = length_B[:, None] + step - 1
        if sampling.greedy:  # without spreading the logits
            id_B1 = self.head.token_of(logits_BK.argmax(-1, keepdim=True))
        else:
            id_B1 = pick(self.head.spread(logits_BK)[:, None], positions_B1, sampling, seeds_B)
        reading = self.reading(logits_BK, sampling, positions_B1, seeds_B)
        return DraftToken(id_B1, logits_BK, reading)

    def reading(
        self, logits_BK: Tensor, sampling: BatchSampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """What the host reads: by default the confidence `[B]`, before temperature and filters."""
        return logits_BK.float().softmax(-1).amax(-1)

    def finish(self, draft: Draft, meta: ForwardMeta) -> Draft:
        """The draft, with what verification need not compute again; `meta` is the nodes' block."""
        return draft
