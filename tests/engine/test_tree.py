"""The shape of a tree is what a walk from node to parent finds."""

from __future__ import annotations

import pytest
import torch
from helpers import brute_depth, random_parents

from kangaroo.engine.tree import Draft, Tree

CPU = torch.device("cpu")


def brute_ancestors(parents_BN: torch.Tensor) -> torch.Tensor:
    rows, size = parents_BN.shape
    ancestors_BNN = torch.zeros(rows, size, size, dtype=torch.bool)
    for row in range(rows):
        for start in range(size):
            node = start
            while node:
                ancestors_BNN[row, start, node] = True
                node = int(parents_BN[row, node])
            ancestors_BNN[row, start, 0] = True
    return ancestors_BNN


@pytest.mark.parametrize("size", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("rows", [1, 3])
def test_ancestors_and_depth_of_random_trees(size, rows):
    generator = torch.Generator().manual_seed(size)
    for _ in range(5):
        parents_BN = random_parents(rows, size, generator)
        depth_BN = brute_depth(parents_BN)
        for spare in (0, 3):  # a bound on the depth may be loose
            tree = Tree(parents_BN, max_depth=int(depth_BN.max()) + spare)
            assert torch.equal(tree.ancestors_BNN, brute_ancestors(parents_BN))
            assert torch.equal(tree.depth_BN, depth_BN)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 65])
def test_ancestors_of_a_chain_are_all_earlier_nodes(size):
    tree = Tree.chain(size, CPU)
    assert tree.is_chain and tree.max_depth == size - 1 and tree.size == size
    assert torch.equal(tree.ancestors_BNN[0], torch.ones(size, size).tril().bool())
    assert tree.depth_BN.tolist() == [list(range(size))]


def test_every_step_of_a_chain_drafter_gets_the_same_tree():
    assert Tree.chain(5, CPU) is Tree.chain(5, CPU)
    assert Tree.chain(5, CPU) is not Tree.chain(6, CPU)


def test_the_draft_of_nothing_is_the_pending_token():
    draft = Draft.nothing(torch.tensor([[7], [8]]))
    assert draft.tree.size == 1
    assert draft.tokens_BN.tolist() == [[7], [8]]
    assert draft.valid_BN.tolist() == [[True], [True]]
