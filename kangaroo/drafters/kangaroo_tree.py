"""Kangaroo with a tree: an adapter drafts the likeliest continuations until all are unlikely.

Shapes: B rows, N draft nodes (node 0 is the pending token), L nodes of a level, C candidates of a
node, M of a level, E occupied slots, W window, D hidden size, K draft vocabulary, G most nodes to
verify.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.drafters.base import Drafter, EarlyExitConfig
from kangaroo.drafters.early_exit import EarlyExit, Read
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget
from kangaroo.engine.cache import ForwardMeta, Tensors
from kangaroo.engine.tree import Draft, Tree
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, DraftSize, Threshold, check_nodes


@dataclass
class KangarooTreeConfig(EarlyExitConfig):
    """Kangaroo's tree (arXiv 2404.18911): a node's confidence is the product of the probabilities
    on its path, and drafting stops when the best confidence of a level falls to `threshold`.

    Args:
        top_k: nodes of a level, and candidates of each node (the paper's K).
        nodes: the most nodes to verify, the most confident ones that pruning leaves.
        min_confidence: verify nodes with a higher confidence; null prunes as the paper does, the
            less confident half of the nodes without a child. Not used with `threshold=auto`.
    """

    name: str = "kangaroo_tree"
    top_k: Count = 10
    nodes: DraftSize = 32
    min_confidence: Threshold | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nodes(self.top_k * self.steps, top_k=self.top_k, steps=self.steps)

    def build(self, lm: TargetModel) -> Drafter:
        layer, head = self.load(lm)
        return KangarooTree(lm, layer, self, head)


class Level(NamedTuple):
    """Nodes of one depth: their parents' places in the draft, tokens, confidence, shallow states,
    and the slots that are hidden from them; all candidates for the level, their confidence, and the
    nodes' places among them; and the nodes' block."""

    parents_BL: Tensor
    tokens_BL: Tensor
    score_BL: Tensor
    f_BLD: Tensor
    hidden_BLE: Tensor
    children_BM: Tensor
    chances_BM: Tensor
    places_BL: Tensor
    meta: ForwardMeta


class Ranking(NamedTuple):
    """The most nodes that a row keeps; all nodes, kept ones first; which are kept; and parents."""

    largest: Tensor
    order_BN: Tensor
    keep_BN: Tensor
    parents_BN: Tensor


class KangarooTree(EarlyExit):
    """Drafts until all nodes are unlikely; `top_k=1` is a chain whose confidence is a product. When
    sampling, a node's children are the tokens that the drafter's distribution ranks highest under
    the noise of their position; their confidence is the probability of their rank without noise."""

    hands_on_states = True  # whether verification continues from the states of its nodes

    def __init__(
        self, lm: TargetModel, adapter: Layer, options: KangarooTreeConfig, head: DraftHead | None
    ):
        super().__init__(lm, adapter, options, head)
        self.top_k = options.top_k
        self.nodes = options.nodes
        if self.top_k > self.head.size:
            raise ConfigError(
                f"drafter.top_k={self.top_k} is more than the {self.head.size} tokens to draft "
                "from."
            )
        self.min_confidence = 0.0 if self.auto else options.min_confidence
        self.max_nodes = self.top_k * self.steps

    def min_node_chances(self, budget: Budget, rows: int) -> list[float]:
        """The confidence that the n-th likeliest node must exceed to be verified, from n = 0 on."""
        chances = budget.min_node_chances(rows, self.nodes, self.auto)
        return [max(chance, self.min_confidence or 0.0) for chance in chances]

    def draft(self, batch: Batch, limits: np.ndarray) -> Draft:
        # the host decides: if there is a limit, it reads one number of each row and level
        active = limits[:, 0] < 1
        limits = np.maximum(limits, np.float32(self.threshold))
        meta, draws = self.begin_round(batch, self.chain_meta(batch, 0, self.max_nodes))
        start = partial(self.start_tree, batch)
        root, read = self.replay(batch, ("root",), start, batch.last(1), meta, self.shallow_BWD)
        levels = [root]
        valid = [np.ones_like(active)]
        for step in range(1, self.steps + 1):
            # a graph for each level, so that none overwrites what the round still reads of another
            key = ("level", step, batch.sampling.kind)
            work = partial(self.grow, batch, step)
            level, best_B, deep_BND = self.replay(batch, key, work, read, meta, draws, levels[-1])
            levels.append(level)
            valid.append(active)
            if step == self.steps:
                break
            if limits[active, step].any():
                active = active & (np.array(best_B.tolist(), np.float32) > limits[:, step])
                if not active.any():
                    break
            read = (level.f_BLD, deep_BND)
            meta = level.meta
        return self._pruned(batch, levels, np.stack(valid, 1))

    def start_tree(
        self, batch: Batch, pending_B1: Tensor, meta: ForwardMeta, window_BWD: Tensor
    ) -> tuple[Level, Read]:
        """The pending token as a level, and what the layer's first pass reads. `meta` is the block
        of the window and of this token."""
        f_B1D, read = self.start(batch, pending_B1, meta, window_BWD)
        root = meta.narrow(self.window, 1)
        hidden_B1E = torch.arange(meta.extent, device=pending_B1.device) > root.slots_RT[..., None]
        # a new block with a mask, which later levels have
        root = self.lm.forward_meta_of(root.slots_RT, root.positions_RT, hidden_B1E, batch.n_slots)
        zero_B1 = torch.zeros_like(pending_B1)
        certain_B1 = torch.ones_like(pending_B1).float()
        level = Level(
            parents_BL=zero_B1,
            tokens_BL=pending_B1,
            score_BL=certain_B1,
            f_BLD=f_B1D,
            hidden_BLE=hidden_B1E,
            children_BM=pending_B1,
            chances_BM=certain_B1,
            places_BL=zero_B1,
            meta=root,
        )
        return level, read

    def grow(
        self, batch: Batch, step: int, read: Read, meta: ForwardMeta, draws: Tensors, last: Level
    ) -> tuple[Level, Tensor, Tensor | None]:
        """The most confident children of the last level, the confidence of the best `[B]`, and, if
        the layer reads deep states, its states of their parents. It reads `read`: the last level,
        and for the root the window, too."""
        length_B, seeds_B, settings_B3 = draws
        width = last.score_BL.shape[1]
        meta = meta.to(read[0].device)
        adapted_BND = self.adapter(*read, meta, self.cache.at(meta))
        adapted_BLD = adapted_BND[:, -width:]  # without the window
        logits_BLK = self.head(adapted_BLD.flatten(0, 1)).unflatten(0, (batch.size, width))
        children_BM = self.head.candidates(
            logits_BLK,
            (length_B[:, None] + step - 1).expand(-1, width),
            batch.sampling.reading(settings_B3),
            seeds_B,
            count=self.top_k,
        ).flatten(1)
        confidence_BLC = logits_BLK.float().softmax(-1).topk(self.top_k).values
        chances_BM = (last.score_BL[..., None] * confidence_BLC).flatten(1)
        score_BL, places_BL = chances_BM.topk(self.top_k)
        above_BL = places_BL // self.top_k  # the places of the parents in the last level
        first = 1 + (step - 1) * self.top_k  # the place of the first node in the draft
        numbers_L = torch.arange(first, first + self.top_k, device=length_B.device)
        slots_BL = length_B[:, None] - 1 + numbers_L
        hidden_BLE = last.hidden_BLE.take_along_dim(above_BL[..., None], 1)
        hidden_BLE = hidden_BLE.scatter(2, slots_BL[..., None], False)
        tokens_BL = children_BM.gather(1, places_BL)
        block = self.lm.forward_meta_of(
            slots_BL,
            (length_B[:, None] - 1 + step).expand(-1, self.top_k),
            hidden_BLE,
            n_slots=batch.n_slots,
            positions_BE=self.positions(length_B, meta.extent),
        )
        level = Level(
            parents_BL=above_BL + max(first - self.top_k, 0),
            tokens_BL=tokens_BL,
            score_BL=score_BL,
            f_BLD=self.run_shallow(tokens_BL, batch, block),
            hidden_BLE=hidden_BLE,
            children_BM=children_BM,
            chances_BM=chances_BM,
            places_BL=places_BL,
            meta=block,
        )
        deep_BLD = adapted_BLD.take_along_dim(above_BL[..., None], 1) if self.reads_deep else None
        return level, score_BL.amax(1), deep_BLD

    def positions(self, length_B: Tensor, extent: int) -> Tensor | None:
        """The positions of the tokens in all slots, `[B, E]`; None without sliding windows."""
        if self.lm.window is None:
            return None
        slots_E = torch.arange(extent, device=length_B.device)
        length_B1 = length_B[:, None]
        depth_BE = (slots_E - length_B1 + self.top_k) // self.top_k  # of a draft node
        return torch.minimum(slots_E, length_B1 - 1 + depth_BE.clamp(min=0))

    def _pruned(self, batch: Batch, levels: list[Level], valid: np.ndarray) -> Draft:
        """The draft of the nodes that are worth verifying. It is ranked and pruned in two graphs;
        between them one sync reads how many nodes there are."""
        levels = self.candidates(levels)
        sizes = [level.score_BL.shape[1] for level in levels]
        costs_G = torch.tensor(self.min_node_chances(batch.budget, len(batch.active)))
        device = batch.length_B.device
        valid_BN = torch.from_numpy(valid.repeat(sizes, 1)).to(device)
        rank_key = ("rank", len(levels))
        ranking = self.replay(batch, rank_key, self.rank, valid_BN, costs_G.to(device), levels)
        size = self.lm.backend.width(int(ranking.largest), min(self.nodes + 1, sum(sizes)))
        prune = partial(self.prune, size, min(len(levels), size) - 1)
        draft = self.replay(batch, ("prune", len(levels), size), prune, ranking, levels)
        # new objects, since the next replay returns the same ones, and a tree caches its masks
        return replace(draft, tree=replace(draft.tree))

    def candidates(self, levels: list[Level]) -> list[Level]:
        """The levels, with the nodes that may be verified."""
        return levels

    def rank(self, valid_BN: Tensor, costs_G: Tensor, levels: list[Level]) -> Ranking:
        """The order in which nodes are kept; see `kept_nodes`."""
        parents_BN = torch.cat([level.parents_BL for level in levels], 1)
        score_BN = torch.cat([level.score_BL for level in levels], 1)
        halves = self.min_confidence is None
        keep_BN = kept_nodes(score_BN, parents_BN, valid_BN, costs_G, halves=halves)
        # kept nodes in their order, then others, which pad rows with fewer
        order_BN = (~keep_BN).int().argsort(dim=1, stable=True)
        return Ranking(keep_BN.sum(1).max(), order_BN, keep_BN, parents_BN)

    def prune(self, size: int, depth: int, ranking: Ranking, levels: list[Level]) -> Draft:
        """The draft of the first `size` nodes of a ranking, whose tree is at most `depth` deep."""
        index_BN = ranking.order_BN[:, :size]
        number_BN = ranking.order_BN.argsort(1)  # of each node in the pruned tree
        keep_BN = ranking.keep_BN.gather(1, index_BN)
        parents_BN = ranking.parents_BN.gather(1, index_BN)
        tree = Tree(number_BN.gather(1, parents_BN) * keep_BN, depth)
        if self.top_k == 1:
            tree = Tree.chain(size, index_BN.device)
        tokens_BN = torch.cat([level.tokens_BL for level in levels], 1).gather(1, index_BN)
        draft = Draft(tokens_BN, tree, keep_BN, entry=self.exit_layer)
        if self.hands_on_states:
            states_BND = torch.cat([level.f_BLD for level in levels], 1)
            draft.hidden_BND = states_BND.take_along_dim(index_BN[..., None], 1)
            draft.meta = ForwardMeta.join([level.meta for level in levels]).take(index_BN)
        return draft


def kept_nodes(
    score_BN: Tensor, parents_BN: Tensor, valid_BN: Tensor, costs_G: Tensor, halves: bool
) -> Tensor:
    """The nodes to verify, `[B, N]`: the root and the most confident nodes, as many as maximise the
    sum of their scores minus the sum of their `costs_G`; with `halves` without the less confident
    half of the nodes that have no child. These are a tree, since no score exceeds the parent's."""
    keep_BN = valid_BN
    if halves:
        children_BN = torch.zeros_like(parents_BN).scatter_add(1, parents_BN, valid_BN.long())
        childless_BN = valid_BN & (children_BN == 0)
        rank_BN = ranks(torch.where(childless_BN, score_BN, torch.inf))
        keep_BN = valid_BN & ~(childless_BN & (rank_BN < childless_BN.sum(1, keepdim=True) // 2))
    score_BN = torch.where(keep_BN, score_BN, -1.0)
    gains_BG = score_BN.sort(descending=True).values[:, 1 : 1 + len(costs_G)]
    gains_BG = gains_BG.double() - costs_G[: gains_BG.shape[1]]  # some are tiny
    count_B1 = F.pad(gains_BG.cumsum(1), (1, 0)).argmax(1, keepdim=True)
    return keep_BN & (ranks(-score_BN) <= count_B1)


def ranks(key_BN: Tensor) -> Tensor:
    """Ranks in ascending order; of equal keys the earlier is first, so parents before children."""
    return key_BN.argsort(dim=1, stable=True).argsort(1)
