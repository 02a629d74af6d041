"""A tree drafted by a layer on shallow states: the likeliest continuations, level by level.

Shapes: B rows, N draft nodes (node 0 is the pending token), L nodes of a level, C candidates of
each, E occupied slots, W window, S levels, D hidden size, K draft vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kangaroo.drafters.chain import chain_block
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.engine.acceleration import Tensors
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget
from kangaroo.engine.cache import Block
from kangaroo.engine.tree import Draft, Tree
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError


class Level(NamedTuple):
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
    f_BLD: Tensor
    hidden_BLE: Tensor


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
        block = chain_block(self.lm, batch, self.window, steps=0, room=self.max_nodes)
        block, draws = self.lm.acceleration.hold(
            self.caches(batch), ("round",), self.shallow_BWD, block, *batch.draws
        )
        root, itself, first = self._root(batch, block)
        levels, blocks, inputs = [root], [itself], (block, *first)
        # on the host, which reads one number a row and level where there is a threshold
        active = ~np.array(batch.done)
        valid = [np.ones_like(active)]
        for step in range(1, self.steps + 1):
            level, own, best_B, deep = self._level(batch, levels[-1], step, draws, *inputs)
            levels.append(level)
            blocks.append(itself.with_tensors(*own))
            valid.append(active)
            if step == self.steps:
                break
            if (limit := max(self.threshold, least[step])) > 0:
                best = np.array(best_B.tolist(), np.float32)
                active = active & (best > np.float32(limit))
                if not active.any():
                    break
            inputs = (blocks[-1], level.f_BLD, *deep)
        worth = self.min_node_chances(budget, rows) if rows > 1 else []
        return self._pruned(batch, levels, blocks, np.stack(valid, 1), worth)

    def _root(self, batch: Batch, block: Block) -> tuple[Level, Block, tuple[Tensor, ...]]:
        """The pending token, where it lies, and what the layer's first pass reads (`begun`).

        Args:
            block: of the window and this token.
        """

        def work(
            pending_B1: Tensor, block: Block, window_BWD: Tensor, length_B: Tensor
        ) -> tuple[Tensor, ...]:
            itself = block.narrow(self.window, 1)
            f_B1D, *first = self.begun(batch, pending_B1, block, window_BWD)
            slots_E = torch.arange(block.extent, device=pending_B1.device)
            none_B1, sure_B1 = torch.zeros_like(pending_B1), torch.ones_like(pending_B1)
            hidden_B1E = (slots_E >= length_B[:, None])[:, None]
            level = Level(none_B1, none_B1, pending_B1, sure_B1.float(), f_B1D, hidden_B1E)
            return *level, *itself.tensors(), *first

        inputs = batch.last(1), block, self.shallow_BWD, batch.length_B
        made = self.lm.acceleration.step(self.caches(batch), ("root",), work, *inputs)
        level, made = Level(*made[: len(Level._fields)]), made[len(Level._fields) :]
        count = len(block.tensors())
        return level, block.with_tensors(*made[:count]), made[count:]

    def _level(
        self,
        batch: Batch,
        last: Level,
        step: int,
        draws: Tensors,
        block: Block,
        f_BND: Tensor,
        *deep: Tensor,
    ) -> tuple[Level, Tensors, Tensor, Tensors]:
        """The most confident children of the last level; the tensors of their block; the score of
        the best `[B]`; and the layer's states of their parents, if it reads such.

        Args:
            draws: `Batch.draws`.
            block, f_BND, deep: what the layer reads: the last level, the first time with a window.
        """

        def work(f_BND: Tensor, block: Block, *tensors: Tensor) -> Tensors:
            (length_B, seeds_B, settings_B3), tensors = tensors[:3], tensors[3:]
            last, deep = Level(*tensors[: len(Level._fields)]), tensors[len(Level._fields) :]
            at, width = block.to(f_BND.device), last.tokens_BL.shape[1]
            adapted_BND = self.adapter(f_BND, deep[0] if deep else None, at, self.cache.at(at))
            adapted_BLD = adapted_BND[:, -width:]  # without the window
            logits_BLK = self.head(adapted_BLD.flatten(0, 1)).unflatten(0, (batch.size, width))
            positions_BL = (length_B[:, None] + step - 1).expand(-1, width)
            how = batch.sampling.reading(settings_B3)
            candidates_BLC = self.head.candidates(
                logits_BLK, positions_BL, how, seeds_B, self.top_k
            )
            confidence_BLC = logits_BLK.float().softmax(-1).topk(self.top_k).values
            score_BLC = last.score_BL[..., None] * confidence_BLC
            score_BL, index_BL = score_BLC.flatten(1).topk(self.top_k)
            of_parent_BL = index_BL // self.top_k
            number_L = torch.arange(self.top_k, device=index_BL.device)
            number_BL = (number_L + self._first(step)).expand(batch.size, -1)
            slots_BL = length_B[:, None] - 1 + number_BL
            hidden_BLE = take(last.hidden_BLE, of_parent_BL).scatter(2, slots_BL[..., None], False)
            tokens_BL = candidates_BLC.flatten(1).gather(1, index_BL)
            at_BL = (length_B[:, None] - 1 + step).expand(-1, self.top_k)
            own = self.lm.block_of(slots_BL, at_BL, hidden_BLE, batch.n_slots)
            parents_BL = last.number_BL.gather(1, of_parent_BL)
            f_BLD = self._shallow(tokens_BL, batch, own)
            level = Level(number_BL, parents_BL, tokens_BL, score_BL, f_BLD, hidden_BLE)
            further = (take(adapted_BLD, of_parent_BL),) if self.reads_deep else ()
            return *level, *own.tensors(), score_BL.amax(1), *further

        # a graph a level, so that none overwrites what the round still reads of another
        key = ("level", step, batch.sampling.kind)
        inputs = f_BND, block, *draws, *last, *deep
        made = self.lm.acceleration.step(self.caches(batch), key, work, *inputs)
        level, made = Level(*made[: len(Level._fields)]), made[len(Level._fields) :]
        count = len(block.tensors())
        return level, made[:count], made[count], made[count + 1 :]

    def _first(self, step: int) -> int:
        """The number of a level's first node."""
        return 1 + (step - 1) * self.top_k

    def _pruned(
        self,
        batch: Batch,
        levels: list[Level],
        blocks: list[Block],
        valid: np.ndarray,
        worth: list[float],
    ) -> Draft:
        """What is verified.

        Args:
            valid: of each row and level.
            worth: as of `best_count`; of one text alone the drafter's own rule decides.
        """
        count = len(levels)

        def ranked(valid_BS: Tensor, worth_W: Tensor, *parts: Tensor) -> Tensors:
            score_BN, parents_BN = torch.cat(parts[:count], 1), torch.cat(parts[count:], 1)
            valid_BN = torch.cat(
                [valid_BS[:, i, None].expand_as(part) for i, part in enumerate(parts[:count])], 1
            )
            keep_BN = kept(score_BN, parents_BN, valid_BN, self.nodes, self.least)
            if len(worth_W):
                rank_BN = ranks(-torch.where(keep_BN, score_BN, -1.0))
                keep_BN = keep_BN & (rank_BN <= best_count(score_BN, keep_BN, worth_W))
            # nodes that are kept, in their order; rows with fewer are filled up with others
            order_BN = (~keep_BN).int().argsort(dim=1, stable=True)
            return order_BN, keep_BN, parents_BN, keep_BN.sum(1).max()

        def taken(order_BN: Tensor, keep_BN: Tensor, parents_BN: Tensor, *parts: Tensor) -> Tensors:
            index_BN = order_BN[:, :size]
            new_number_BN = torch.zeros_like(parents_BN).scatter(
                1, index_BN, torch.arange(size, device=index_BN.device).expand_as(index_BN)
            )
            keep_BN = keep_BN.gather(1, index_BN)
            parents_BN = new_number_BN.gather(1, parents_BN.gather(1, index_BN)) * keep_BN
            tokens_BN = torch.cat(parts[:count], 1).gather(1, index_BN)
            f_BND = take(torch.cat(parts[count : 2 * count], 1), index_BN)
            each, tensors = len(blocks[0].tensors()), parts[2 * count :]
            own = [
                blocks[0].with_tensors(*tensors[i : i + each]) for i in range(0, len(tensors), each)
            ]
            return tokens_BN, parents_BN, keep_BN, f_BND, *Block.join(own).take(index_BN).tensors()

        replay, device = self.lm.acceleration.replay, batch.length_B.device
        caches, nodes = self.caches(batch), self._first(count)
        uploaded = torch.from_numpy(valid).to(device), torch.tensor(worth).to(device)
        scores, parents = [level.score_BL for level in levels], [x.parents_BL for x in levels]
        inputs = *uploaded, *scores, *parents
        *order, most_kept = replay(
            caches, ("rank", count), ranked, *inputs, tokens=batch.size * nodes
        )
        # one sync a round
        size = self.lm.acceleration.width(int(most_kept), min(self.nodes + 1, nodes))
        inputs = (
            *order,
            *(level.tokens_BL for level in levels),
            *(level.f_BLD for level in levels),
            *(tensor for block in blocks for tensor in block.tensors()),
        )
        tokens_BN, parents_BN, keep_BN, f_BND, *own = replay(
            caches, ("prune", count, size), taken, *inputs, tokens=batch.size * nodes
        )
        chain = self.top_k == 1
        depth = min(count, size) - 1
        self.proposed = Draft(
            tokens_BN=tokens_BN,
            tree=Tree.chain(size, device) if chain else Tree(parents_BN, depth),
            valid_BN=keep_BN,
            hidden_BND=f_BND,
            entry=self.exit_layer,
            block=blocks[0].with_tensors(*own),
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


def best_count(score_BN: Tensor, keep_BN: Tensor, worth_W: Tensor) -> Tensor:
    """How many nodes besides the root make the sum of their scores less `worth` largest, `[B, 1]`.

    Args:
        worth_W: of the nodes that are kept, the likeliest first, what each has to exceed.
    """
    gains_BN = torch.where(keep_BN, score_BN, -1.0).sort(descending=True).values[:, 1:]
    gains_BN = gains_BN[:, : len(worth_W)] - worth_W[: gains_BN.shape[1]]
    sums_BN = torch.nn.functional.pad(gains_BN.cumsum(1), (1, 0))
    return sums_BN.argmax(1, keepdim=True)


def ranks(key_BN: Tensor) -> Tensor:
    """Places in ascending order; of equals the earlier is first, so that a parent is."""
    return key_BN.argsort(dim=1, stable=True).argsort(1)


def take(x_BNX: Tensor, index_BL: Tensor) -> Tensor:
    """`x[b, index[b, l]]`."""
    return x_BNX.gather(1, index_BL[..., None].expand(-1, -1, x_BNX.shape[-1]))
