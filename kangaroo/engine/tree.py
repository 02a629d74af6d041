"""A draft, which is a tree of tokens below the pending token; and the walk that accepts a path.

Shapes: B rows (1 where all rows share a topology), N nodes, P = 1 + the draft's largest depth,
D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.engine.cache import ForwardMeta

# A row's tokens below the pending one, and their parents: 0 is the pending token, i the i-th here.
Nodes = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, eq=False)
class Tree:
    """The topology of a draft. Parents come before their children; the root is its own parent.

    Args:
        max_depth: the largest depth that any row can have, known on the host.
        is_chain: node i is the child of node i - 1 in every row, so keys need not be moved.
    """

    parents_BN: Tensor
    max_depth: int
    is_chain: bool = False

    @property
    def size(self) -> int:
        """The number of nodes, with the root."""
        return self.parents_BN.shape[1]

    @cached_property
    def ancestors_BNN(self) -> Tensor:
        """`[b, i, j]`: whether node j lies on the path from the root to node i, or is i."""
        reach_BNN = torch.eye(self.size, dtype=torch.bool, device=self.parents_BN.device)
        reach_BNN = reach_BNN.expand(self.parents_BN.shape[0], -1, -1)
        jump_BN = self.parents_BN
        for _ in range(max(self.max_depth, 1).bit_length()):  # each round doubles the path covered
            reach_BNN = reach_BNN | reach_BNN.gather(1, jump_BN[..., None].expand_as(reach_BNN))
            jump_BN = jump_BN.gather(1, jump_BN)
        return reach_BNN

    @cached_property
    def depth_BN(self) -> Tensor:
        """The number of edges from the root to each node, `[B, N]`."""
        return self.ancestors_BNN.sum(-1) - 1

    def place(self, start_B: Tensor, extent: int, below: int) -> tuple[Tensor, Tensor, Tensor]:
        """The nodes' slots and positions, `[B, N]`, and the slots that are hidden from each,
        `[B, N, extent]`; for the arguments see `TargetModel.forward_meta`."""
        start_B1 = start_B[:, None]
        device = start_B.device
        slots_E = torch.arange(extent, device=device)
        offsets_BN = start_B1 + torch.arange(self.size, device=device)
        if self.is_chain and not below:
            return offsets_BN, offsets_BN, slots_E > offsets_BN[..., None]
        slots_BN = offsets_BN % extent
        seen_BNE = (slots_E < start_B1)[:, None].repeat(1, self.size, 1)
        itself_NN = torch.eye(self.size, dtype=torch.bool, device=device)
        seen_BNN = self.ancestors_BNN & ((offsets_BN >= 0)[:, None] | itself_NN)
        seen_BNE.scatter_(2, slots_BN[:, None].expand_as(seen_BNN), seen_BNN)
        return slots_BN, (start_B1 + self.depth_BN).clamp(min=0), ~seen_BNE

    @staticmethod
    @cache  # without a limit, since CUDA graphs hold the tensor's address
    def chain(size: int, device: torch.device) -> Tree:
        """`size` nodes in a line."""
        parents_N = (torch.arange(size, device=device) - 1).clamp(min=0)
        return Tree(parents_N[None], max_depth=size - 1, is_chain=True)


@dataclass
class Draft:
    """Proposed tokens, to be verified by `layers[entry:]` of the target.

    Args:
        tokens_BN: node 0 is the pending token: committed, but in no cache yet.
        valid_BN: false marks padding, which never matches; node 0 is always true.
        hidden_BND: the output of the target's layer `entry - 1` at each node, if the drafter has it
            (Kangaroo's shallow layers); None starts from the embeddings.
        probs_BNV: the distribution that each node's token was drawn from, for `verify.py`.
        meta: where the nodes lie; None leaves that to the stepper.
    """

    tokens_BN: Tensor
    tree: Tree
    valid_BN: Tensor
    hidden_BND: Tensor | None = None
    entry: int = 0
    probs_BNV: Tensor | None = None
    meta: ForwardMeta | None = None

    def widen(self, size: int, depth: int) -> None:
        """Pad a draft without states and probabilities to `size` nodes and a tree of this depth."""
        padding = 0, size - self.tree.size
        self.tokens_BN = F.pad(self.tokens_BN, padding)
        self.valid_BN = F.pad(self.valid_BN, padding)
        if self.tree.is_chain:
            self.tree = Tree.chain(size, self.tokens_BN.device)
        else:
            self.tree = Tree(F.pad(self.tree.parents_BN, padding), depth)

    @staticmethod
    def nothing(pending_B1: Tensor) -> Draft:
        """The draft of vanilla decoding: the pending token alone."""
        tree = Tree.chain(1, pending_B1.device)
        return Draft(pending_B1, tree, torch.ones_like(pending_B1, dtype=torch.bool))

    @staticmethod
    def listed(pending_B1: Tensor, nodes: Mapping[int, Nodes]) -> Draft:
        """A draft from lists on the host, by row; rows without a list draft nothing."""
        by_row = [nodes.get(row, ((), ())) for row in range(len(pending_B1))]
        tokens, parents = zip(*by_row, strict=True)
        size = 1 + max(map(len, tokens))
        device = pending_B1.device

        def padded(rows: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor([[0, *row, *[0] * (size - 1 - len(row))] for row in rows])

        tree = Tree.chain(size, device)
        if any(list(row) != list(range(len(row))) for row in parents):
            depths = [[0] for _ in parents]
            for depth, row in zip(depths, parents, strict=True):
                for parent in row:
                    depth.append(depth[parent] + 1)
            tree = Tree(padded(parents).to(device), max_depth=max(map(max, depths)))
        valid_BN = torch.arange(size) <= torch.tensor([[len(row)] for row in tokens])
        tokens_BN = torch.cat([pending_B1, padded(tokens)[:, 1:].to(device)], 1)
        return Draft(tokens_BN, tree, valid_BN.to(device))


class Verdict(NamedTuple):
    """The result of verification: the target's token after each node, the number of accepted draft
    tokens, and the nodes of the accepted path from the root on; the last one fills up the row."""

    choice_BN: Tensor
    count_B: Tensor
    path_BP: Tensor


def accept(draft: Draft, choice_BN: Tensor) -> Verdict:
    """Accept the longest path that the target would have written itself, by its choice after each
    node. Sources: Leviathan et al. 2023, section 2.3; for matched noise arXiv 2408.07978."""
    tree = draft.tree
    steps_P = torch.arange(tree.max_depth + 1, device=choice_BN.device)
    if tree.is_chain:  # a node's number is its depth
        matched_BN = draft.valid_BN[:, 1:] & (draft.tokens_BN[:, 1:] == choice_BN[:, :-1])
        count_B = matched_BN.cumprod(1).sum(1)
        return Verdict(choice_BN, count_B, torch.minimum(steps_P, count_B[:, None]))
    parents_BN = tree.parents_BN.expand_as(draft.tokens_BN)
    matched_BN = draft.valid_BN & (draft.tokens_BN == choice_BN.gather(1, parents_BN))
    matched_BN = matched_BN | (tree.depth_BN == 0)  # the pending token is committed already
    alive_BN = (~tree.ancestors_BNN | matched_BN[:, None]).all(-1)
    best_B1 = (alive_BN * (tree.depth_BN + 1)).argmax(-1, keepdim=True)
    count_B1 = tree.depth_BN.take_along_dim(best_B1, 1)
    on_path_BN = tree.ancestors_BNN.take_along_dim(best_B1[..., None], 1)[:, 0]
    order_BN = torch.where(on_path_BN, tree.depth_BN, tree.size).argsort(dim=-1, stable=True)
    path_BP = torch.where(steps_P <= count_B1, order_BN[:, : len(steps_P)], best_B1)
    return Verdict(choice_BN, count_B1[:, 0], path_BP)
