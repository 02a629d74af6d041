"""A tree drafted by a layer on shallow states: the likeliest continuations, level by level.

Shapes: B rows, N draft nodes (node 0 is the pending token), L nodes of a level, C candidates of
each, E occupied slots, W window, D hidden size, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kangaroo.drafters.chain import chain_block
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget
from kangaroo.engine.cache import Block
from kangaroo.engine.tree import Draft, Tree
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError


@dataclass
class Level:
    """Nodes of one depth, all of which have passed the shallow layers.

    Args:
        number_BL: their places in the draft.
        parents_BL: those of their parents.
        score_BL: confidence.
        f_BLD: shallow states.
        hidden_BLE: true for the slots that they do not see.
    """

    number_BL: Tensor
    parents_BL: Tensor
    tokens_BL: Tensor
    score_BL: Tensor
    valid_BL: Tensor
    f_BLD: Tensor
    hidden_BLE: Tensor
    block: Block


class LayerTree(EarlyExit):
    """Drafts until all grow unlikely; with `top_k=1` a chain whose confidence is a product.

    Under sampling a node's children are the tokens that the target would likeliest choose under the
    noise of their position; their confidence stays the probability of their rank without noise and
    temperature, as the chain's does.
    """

    def __init__(
        self,
        lm: LM,
        adapter: Layer,
        steps: int = 6,
        threshold: float = 0.4,
        head: DraftHead | None = None,
        top_k: int = 10,
        nodes: int = 32,
        least: float | None = None,
    ):
        super().__init__(lm, adapter, steps, threshold, head)
        if top_k > self.head.size:
            raise ConfigError(
                f"drafter.top_k={top_k} is more than the {self.head.size} tokens to draft from."
            )
        self.top_k, self.nodes, self.least = top_k, nodes, least
        self.max_nodes = top_k * steps

    def min_node_chances(self, budget: Budget, rows: int) -> list[float]:
        """What the n-th likeliest node has to exceed to be verified in so many rows."""
        chances = budget.min_node_chances(rows, self.nodes)
        return [max(chance, self.least or 0.0) for chance in chances]

    def propose(self, batch: Batch) -> Draft:
        rows, budget = batch.active, batch.budget
        least = budget.min_chain_chances(rows, self.steps, self.draft_cost)
        if least[0] >= 1:
            return Draft.nothing(batch.last(1))
        self.read_prompts()
        active_B = ~batch.done_B
        root, at, f_BND, deep_BND = self._root(batch)
        levels = [root]
        for step in range(1, self.steps + 1):
            adapted_BLD = self.adapter(f_BND, deep_BND, at, self.cache.at(at))
            last = levels[-1]
            adapted_BLD = adapted_BLD[:, -last.tokens_BL.shape[1] :]  # without the window
            level, of_parent_BL = self._level(batch, levels, adapted_BLD, active_B)
            levels.append(level)
            if step == self.steps:
                break
            if (limit := max(self.threshold, least[step])) > 0:
                active_B = active_B & (level.score_BL.amax(1) > limit)
                if not active_B.any():  # the one sync a level that a threshold costs
                    break
            f_BND, at = level.f_BLD, level.block.to(level.f_BLD.device)
            deep_BND = take(adapted_BLD, of_parent_BL) if self.reads_deep else None
        return self._pruned(levels, self.min_node_chances(budget, rows) if rows > 1 else [])

    def _root(self, batch: Batch) -> tuple[Level, Block, Tensor, Tensor | None]:
        """The pending token, and what the adapter's first pass reads: the window and this."""
        window, device = self.window, batch.length_B.device
        block = chain_block(self.lm, batch, window, steps=0, room=self.max_nodes)
        pending_B1, itself = batch.last(1), block.narrow(window, 1)
        f_B1D = self._shallow(pending_B1, batch, itself)
        slots_E = torch.arange(block.extent, device=device)
        zeros_B1 = torch.zeros_like(pending_B1)
        root = Level(
            number_BL=zeros_B1,
            parents_BL=zeros_B1,
            tokens_BL=pending_B1,
            score_BL=torch.ones_like(pending_B1, dtype=torch.float32),
            valid_BL=torch.ones_like(pending_B1, dtype=torch.bool),
            f_BLD=f_B1D,
            hidden_BLE=(slots_E > batch.base_B[:, None])[:, None],
            block=itself,
        )
        at = block.to(f_B1D.device)
        return root, at, torch.cat([self.shallow_BWD, f_B1D], 1), self.deep_before(at)

    def _level(
        self, batch: Batch, levels: list[Level], adapted_BLD: Tensor, active_B: Tensor
    ) -> tuple[Level, Tensor]:
        """The most confident children of the last level, and their parents' places in it."""
        last, step = levels[-1], len(levels)
        width = last.tokens_BL.shape[1]
        logits_BLK = self.head(adapted_BLD.flatten(0, 1)).unflatten(0, (batch.size, width))
        positions_BL = (batch.length_B[:, None] + step - 1).expand(-1, width)
        candidates_BLC = self.head.candidates(
            logits_BLK, positions_BL, batch.sampling, batch.seeds_B, self.top_k
        )
        confidence_BLC = logits_BLK.float().softmax(-1).topk(self.top_k).values
        score_BLC = last.score_BL[..., None] * confidence_BLC
        score_BL, index_BL = score_BLC.flatten(1).topk(self.top_k)
        of_parent_BL = index_BL // self.top_k
        first = sum(level.tokens_BL.shape[1] for level in levels)
        number_BL = torch.arange(first, first + self.top_k, device=index_BL.device)
        number_BL = number_BL.expand(batch.size, -1)
        slots_BL = batch.base_B[:, None] + number_BL
        hidden_BLE = take(last.hidden_BLE, of_parent_BL).scatter(2, slots_BL[..., None], False)
        tokens_BL = candidates_BLC.flatten(1).gather(1, index_BL)
        at_BL = (batch.base_B[:, None] + step).expand(-1, self.top_k)
        block = self.lm.block_of(slots_BL, at_BL, hidden_BLE, batch.n_slots)
        level = Level(
            number_BL=number_BL,
            parents_BL=last.number_BL.gather(1, of_parent_BL),
            tokens_BL=tokens_BL,
            score_BL=score_BL,
            valid_BL=active_B[:, None].expand(-1, self.top_k),
            f_BLD=self._shallow(tokens_BL, batch, block),
            hidden_BLE=hidden_BLE,
            block=block,
        )
        return level, of_parent_BL

    def _pruned(self, levels: list[Level], worth: list[float]) -> Draft:
        """What is verified.

        Args:
            worth: as of `best_count`; of one text alone the drafter's own rule decides.
        """
        parents_BN = torch.cat([level.parents_BL for level in levels], 1)
        valid_BN = torch.cat([level.valid_BL for level in levels], 1)
        score_BN = torch.cat([level.score_BL for level in levels], 1)
        keep_BN = kept(score_BN, parents_BN, valid_BN, self.nodes, self.least)
        if worth:
            rank_BN = ranks(-torch.where(keep_BN, score_BN, -1.0))
            keep_BN = keep_BN & (rank_BN <= best_count(score_BN, keep_BN, worth))
        size = int(keep_BN.sum(1).max())  # one sync a round
        # nodes that are kept, in their order; rows with fewer are filled up with others
        index_BN = (~keep_BN).int().argsort(dim=1, stable=True)[:, :size]
        new_number_BN = torch.zeros_like(parents_BN).scatter(
            1, index_BN, torch.arange(size, device=index_BN.device).expand_as(index_BN)
        )
        keep_BN = keep_BN.gather(1, index_BN)
        parents_BN = new_number_BN.gather(1, parents_BN.gather(1, index_BN)) * keep_BN
        depth = min(len(levels), size) - 1
        chain = self.top_k == 1
        tree = Tree.chain(size, parents_BN.device) if chain else Tree(parents_BN, depth)
        self.proposed = Draft(
            tokens_BN=torch.cat([level.tokens_BL for level in levels], 1).gather(1, index_BN),
            tree=tree,
            valid_BN=keep_BN,
            hidden_BND=take(torch.cat([level.f_BLD for level in levels], 1), index_BN),
            entry=self.exit_layer,
            block=Block.join([level.block for level in levels]).take(index_BN),
        )
        return self.proposed


def kept(
    score_BN: Tensor, parents_BN: Tensor, valid_BN: Tensor, nodes: int, least: float | None = None
) -> Tensor:
    """Which nodes are left, `[B, N]`: the root always, and with a node its parent.

    Args:
        score_BN: no higher than the parent's; the root's is the highest.
        nodes: at most so many besides the root.
        least: those whose score is higher; None is all but the less confident half of the nodes
            that have no child.
    """
    if least is None:
        children_BN = torch.zeros_like(parents_BN).scatter_add(1, parents_BN, valid_BN.long())
        childless_BN = valid_BN & (children_BN == 0)
        rank_BN = ranks(torch.where(childless_BN, score_BN, torch.inf))
        dropped_BN = childless_BN & (rank_BN < childless_BN.sum(1, keepdim=True) // 2)
    else:
        dropped_BN = score_BN <= least
    keep_BN = valid_BN & ~dropped_BN
    return keep_BN & (ranks(-torch.where(keep_BN, score_BN, -1.0)) <= nodes)


def best_count(score_BN: Tensor, keep_BN: Tensor, worth: Sequence[float]) -> Tensor:
    """How many nodes besides the root make the sum of their scores less `worth` largest, `[B, 1]`.

    Args:
        worth: of the nodes that are kept, the likeliest first, what each has to exceed.
    """
    gains_BN = torch.where(keep_BN, score_BN, -1.0).sort(descending=True).values[:, 1:]
    gains_BN = gains_BN[:, : len(worth)] - gains_BN.new_tensor(worth[: gains_BN.shape[1]])
    sums_BN = torch.nn.functional.pad(gains_BN.cumsum(1), (1, 0))
    return sums_BN.argmax(1, keepdim=True)


def ranks(key_BN: Tensor) -> Tensor:
    """Places in ascending order; of equals the earlier is first, so that a parent is."""
    return key_BN.argsort(dim=1, stable=True).argsort(1)


def take(x_BNX: Tensor, index_BL: Tensor) -> Tensor:
    """`x[b, index[b, l]]`."""
    return x_BNX.gather(1, index_BL[..., None].expand(-1, -1, x_BNX.shape[-1]))
