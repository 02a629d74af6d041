"""A tree is what a walk from node to parent finds, a verdict what a walk down the tree finds, and
either rule leaves the target's distribution.

Shapes: B rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from engine_cases import assert_distributed
from helpers import adapter_for, brute_depth, forward_logits, random_parents, tiny

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Rule, Sampling, warp
from kangaroo.engine.tree import Draft, Tree, accept

CPU = torch.device("cpu")


# ---- trees -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("size", [1, 2, 5, 16, 17, 65])
def test_ancestors_of_a_chain_are_all_earlier_nodes(size):
    tree = Tree.chain(size, CPU)
    assert tree.is_chain and tree.max_depth == size - 1 and tree.size == size
    assert torch.equal(tree.ancestors_BNN[0], torch.ones(size, size).tril().bool())
    assert tree.depth_BN.tolist() == [list(range(size))]
    assert Tree.chain(size, CPU) is tree  # for every step of a drafter


# ---- walking -----------------------------------------------------------------------------------


def walk(parents: list[int], tokens: list[int], valid: list[bool], choice: list[int]) -> list[list]:
    """Every longest path from the root by the target's choices."""
    longest = [[0]]
    open_paths = [[0]]
    while open_paths:
        path = open_paths.pop()
        for node in range(1, len(parents)):
            here = path[-1]
            if parents[node] == here and valid[node] and tokens[node] == choice[here]:
                longer = [*path, node]
                open_paths.append(longer)
                if len(longer) > len(longest[0]):
                    longest = [longer]
                elif len(longer) == len(longest[0]):
                    longest.append(longer)
    return longest


@pytest.mark.parametrize("shared", [False, True], ids=["per-row", "shared"])
@pytest.mark.parametrize("size", [1, 2, 7, 20])
def test_accept_is_the_longest_walk_on_random_trees(size, shared):
    generator = torch.Generator().manual_seed(size)
    rows, depths = 8, set()
    for _ in range(10):
        parents_BN = random_parents(1 if shared else rows, size, generator)
        tree = Tree(parents_BN, max_depth=int(brute_depth(parents_BN).max()))
        # three tokens, so that matches, siblings with one token, and matches below misses abound
        tokens_BN = torch.randint(3, (rows, size), generator=generator)
        choice_BN = torch.randint(3, (rows, size), generator=generator)
        valid_BN = torch.rand(rows, size, generator=generator) < 0.8
        valid_BN[:, 0] = True
        verdict = accept(Draft(tokens_BN, tree, valid_BN), choice_BN)
        for row in range(rows):
            paths = walk(
                parents_BN[0 if shared else row].tolist(),
                tokens_BN[row].tolist(),
                valid_BN[row].tolist(),
                choice_BN[row].tolist(),
            )
            count, path = int(verdict.count_B[row]), verdict.path_BP[row].tolist()
            assert path[: count + 1] in paths
            assert path == path[: count + 1] + [path[count]] * (tree.max_depth - count)
            assert int(verdict.best_B[row]) == path[count]
            depths.add(count)
    assert len(depths) > min(size, 3) - 1  # short and long walks both occur


def test_a_chain_and_the_same_tree_in_general_form_have_one_verdict():
    generator = torch.Generator().manual_seed(0)
    tokens_BN, choice_BN = torch.randint(2, (2, 50, 6), generator=generator)
    valid_BN = torch.rand(50, 6, generator=generator) < 0.9
    valid_BN[:, 0] = True
    chain = Tree.chain(6, CPU)
    trees = chain, Tree(chain.parents_BN, max_depth=5)
    verdicts = [accept(Draft(tokens_BN, tree, valid_BN), choice_BN) for tree in trees]
    assert all(map(torch.equal, *verdicts))


# ---- rejection ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", Rule)
def test_kangaroo_writes_triples_from_the_targets_joint_distribution(rule):
    """End to end over many seeds, against the distribution by transformers' own forward."""
    size, rows = 3, 1500
    lm = tiny(vocab_size=size)
    sampling = Sampling(temperature=8.0, rule=rule)
    drafter = Kangaroo(lm, adapter_for(lm), steps=2, threshold=0.97)
    done = Engine(lm, drafter).generate([[size - 1]] * rows, 3, sampling)
    triples = torch.tensor([generation.tokens for generation in done])

    joint = torch.ones(1)
    for length in range(3):
        following = [
            warp(forward_logits(lm, [size - 1, *before])[None, -1:], sampling).softmax(-1)[0]
            for before in itertools.product(range(size), repeat=length)
        ]
        joint = (joint[:, None] * torch.cat(following)).flatten()
    assert joint.min() * rows > 5  # chi-square wants a few of each
    assert_distributed(triples @ torch.tensor([size**2, size, 1]), joint)

    steps = [step for generation in done for step in generation.steps]
    assert 0.2 < sum(s.accepted for s in steps) / sum(s.drafted for s in steps) < 0.95
    assert {0, 1, 2} == {step.drafted for step in steps} | {0}  # some rows stop early, some do not
