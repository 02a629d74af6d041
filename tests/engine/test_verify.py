"""A tree is what a walk from node to parent finds, a verdict what a walk down the tree finds, and
either rule leaves the target's distribution.

Shapes: B rows, N draft nodes, V vocabulary.
"""

import itertools

import pytest
import torch
from engine_cases import SMALL, assert_distributed
from helpers import adapter_for, brute_depth, chain_of, forward_logits, random_parents, tiny
from scipy.stats import binomtest
from torch import Tensor

from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import NoiseStream, Rule, Sampling, combine, perturb, warp
from kangaroo.engine.tree import Draft, Tree, accept
from kangaroo.engine.verify import draft_seeds, write

CPU = torch.device("cpu")
SIZE, ROWS = 5, 20_000
ONES_B1 = torch.ones(ROWS, 1, dtype=torch.long)
SAMPLED = Sampling(temperature=0.9, rule=Rule.rejection)
FILTERED = Sampling(temperature=0.9, top_k=3, rule=Rule.rejection)
BLOCK = Sampling(temperature=0.9, rule=Rule.block)


def walk(parents: list[int], tokens: list[int], valid: list[bool], choice: list[int]) -> list[list]:
    """Every longest path from the root by the target's choices."""
    paths = [[0]]
    for path in paths:  # which grows along
        here = path[-1]
        paths += [
            [*path, node]
            for node in range(1, len(parents))
            if parents[node] == here and valid[node] and tokens[node] == choice[here]
        ]
    return [path for path in paths if len(path) == max(map(len, paths))]


@pytest.mark.parametrize("kind", ["per-row", "shared", "chain"])
@pytest.mark.parametrize("size", [1, 2, 7, 20])
def test_accept_is_the_longest_walk_on_random_trees_and_chains(size, kind):
    generator = torch.Generator().manual_seed(size)
    rows, depths = 8, set()
    for _ in range(10):
        parents_BN = random_parents(rows if kind == "per-row" else 1, size, generator)
        tree = Tree(parents_BN, max_depth=int(brute_depth(parents_BN).max()))
        if kind == "chain":
            tree = Tree.chain(size, CPU)
            parents_BN = tree.parents_BN
        # three tokens, so that matches, siblings with one token, and matches below misses abound
        tokens_BN = torch.randint(3, (rows, size), generator=generator)
        choice_BN = torch.randint(3, (rows, size), generator=generator)
        valid_BN = torch.rand(rows, size, generator=generator) < 0.8
        valid_BN[:, 0] = True
        verdict = accept(Draft(tokens_BN, tree, valid_BN), choice_BN)
        of_rows = parents_BN.expand(rows, -1), tokens_BN, valid_BN, choice_BN
        for row in range(rows):
            paths = walk(*(x[row].tolist() for x in of_rows))
            count, path = int(verdict.count_B[row]), verdict.path_BP[row].tolist()
            assert path[: count + 1] in paths
            assert path == path[: count + 1] + [path[count]] * (tree.max_depth - count)
            depths.add(count)
    assert tree.is_chain == (kind == "chain")
    assert len(depths) > min(size, 3) - 1  # short and long walks both occur


class Markov:
    """A target with `logits_VV` and a drafter with `q_VV`: each goes by the last token alone."""

    def __init__(self, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.logits_VV = torch.randn(SIZE, SIZE, generator=generator)
        self.q_VV = (torch.randn(SIZE, SIZE, generator=generator)).softmax(-1)
        self.q_VV[:, 2] = 0  # tokens that are never drafted must still be written
        self.q_VV /= self.q_VV.sum(-1, keepdim=True)

    def p_VV(self, sampling: Sampling) -> Tensor:
        return warp(self.logits_VV[None], combine([sampling]))[0].softmax(-1)

    def round(
        self,
        sampling: Sampling,
        steps: int,
        pending_B1: Tensor = ONES_B1,
        start: int = 10,
        valid_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draft, verify: the new tokens `[B, steps + 1]` from position `start` on, and how many."""
        seeds_B = torch.arange(len(pending_B1))
        tokens, probs = [pending_B1], [torch.zeros(len(pending_B1), 1, SIZE)]
        for step in range(steps):
            probs.append(self.q_VV[tokens[-1]])
            position_B1 = torch.full_like(pending_B1, start + step)
            drafting_B = seeds_B
            if sampling.rule is Rule.block:
                drafting_B = draft_seeds(seeds_B, torch.full_like(seeds_B, start))
            scores = perturb(probs[-1].log(), drafting_B, position_B1, NoiseStream.choice)
            tokens.append(scores.argmax(-1))
        tokens_BN = torch.cat(tokens, 1)
        tree, probs_BNV = Tree.chain(steps + 1, CPU), torch.cat(probs, 1)
        valid_BN = torch.ones_like(tokens_BN, dtype=torch.bool) if valid_BN is None else valid_BN
        draft = Draft(tokens_BN, tree, valid_BN, probs_BNV=probs_BNV)
        positions_BN = start + torch.arange(steps + 1).expand_as(tokens_BN)
        logits_BNV, how = self.logits_VV[tokens_BN], combine([sampling])
        verdict = accept(draft, write(draft, logits_BNV, positions_BN, how, seeds_B))
        return verdict.choice_BN.gather(1, verdict.path_BP), verdict.count_B


@pytest.mark.parametrize("sampling", [SAMPLED, FILTERED, BLOCK], ids=["all", "top-k", "block"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_rule_writes_token_pairs_from_the_targets_joint_distribution(steps, sampling):
    """Over two rounds where need be, though the second draws the first one's noise again."""
    model = Markov(2)
    valid_BN = torch.ones(ROWS, steps + 1, dtype=torch.bool)
    valid_BN[::3, 2:] = False  # some rows have stopped drafting
    first_BP, count_B = model.round(sampling, steps, valid_BN=valid_BN)
    second_BP, _ = model.round(sampling, steps, first_BP[:, :1], 11, valid_BN)
    pairs_B2 = first_BP[:, :2].clone()
    pairs_B2[count_B == 0, 1] = second_BP[count_B == 0, 0]
    p_VV = model.p_VV(sampling)
    assert_distributed(pairs_B2[:, 0] * SIZE + pairs_B2[:, 1], p_VV[1][:, None] * p_VV)
    assert {0, 1} <= set(count_B.tolist())
    if steps == 1:
        rate = float(torch.minimum(p_VV[1], model.q_VV[1]).sum())  # that of the paper
        assert binomtest(int(count_B.sum()), ROWS, rate).pvalue > SMALL and 0.1 < rate < 0.9


def test_block_verification_writes_triples_over_as_many_rounds_as_it_takes():
    """A round's noise is its own: here each round drafts from the same distribution as the last."""
    model, length_B = Markov(3), torch.zeros(ROWS, dtype=torch.long)
    model.logits_VV[:], model.q_VV[:] = model.logits_VV[1], model.q_VV[1]
    text_BT = torch.ones(ROWS, 8, dtype=torch.long)
    for start in range(3):
        new_BP, count_B = model.round(BLOCK, 3, text_BT[:, start, None], 10 + start)
        rows = length_B == start
        text_BT[rows, start + 1 : start + 5] = new_BP[rows]
        length_B[rows] += count_B[rows] + 1
    p_VV = model.p_VV(BLOCK)
    joint_VVV = p_VV[1][:, None, None] * p_VV[..., None] * p_VV
    triples_B = (text_BT[:, 1] * SIZE + text_BT[:, 2]) * SIZE + text_BT[:, 3]
    assert_distributed(triples_B, joint_VVV)


def test_block_verification_accepts_more_than_rejection_and_all_that_is_drawn_as_the_target_draws():
    counts = [Markov(2).round(how, 3)[1] for how in (SAMPLED, BLOCK)]
    rejection_mean, block_mean = (float(count_B.float().mean()) for count_B in counts)
    error = float(counts[0].float().std()) / ROWS**0.5
    assert block_mean > rejection_mean + 3 * error
    model = Markov()
    model.q_VV = model.p_VV(BLOCK)
    assert (model.round(BLOCK, 2)[1] == 2).all()


@pytest.mark.parametrize("rule", [Rule.rejection, Rule.block])  # for match: test_conformance.py
def test_kangaroo_writes_triples_from_the_targets_joint_distribution(rule):
    """End to end over many seeds, against the distribution by transformers' own forward."""
    size, rows = 3, 500
    lm = tiny(vocab_size=size).compile_for_decoding()
    sampling = Sampling(temperature=11.0, rule=rule)
    drafter = chain_of(lm, adapter_for(lm), steps=2, threshold=0.97)
    done = Engine(lm, drafter).generate([[size - 1]] * rows, 3, sampling)
    triples = torch.tensor([generation.tokens for generation in done])

    joint, how = torch.ones(1), combine([sampling])
    for length in range(3):
        following = [
            warp(forward_logits(lm, [size - 1, *before])[None, -1:], how).softmax(-1)[0]
            for before in itertools.product(range(size), repeat=length)
        ]
        joint = (joint[:, None] * torch.cat(following)).flatten()
    assert joint.min() * rows > 5  # chi-square wants a few of each
    assert_distributed(triples @ torch.tensor([size**2, size, 1]), joint)

    steps = [step for generation in done for step in generation.steps]
    assert 0.2 < sum(s.accepted for s in steps) / sum(s.drafted for s in steps) < 0.95
    assert {1, 2} <= {step.drafted for step in steps} <= {0, 1, 2}  # some rows stop early
