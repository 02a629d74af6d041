"""What Token Recycling is told of verified nodes, and the tree that it makes of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from helpers import forward_logits, random_prompts, tiny

from kangaroo.drafters.token_recycling import RIGHT, TokenRecycling, static_tree, tree_chances
from kangaroo.engine.budget import Budget
from kangaroo.engine.costs import VerifyCosts
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling

PROMPTS = random_prompts(5, 30, 9)


def begun(drafter: TokenRecycling, *texts: list[int], costs: VerifyCosts | None = None):
    """Only what the drafter reads of a batch."""
    budget = Budget((costs or VerifyCosts([1, 2], [1.0, 1.0])).curve, always=costs is None)
    batch = SimpleNamespace(texts=list(texts), size=len(texts), active=len(texts), budget=budget)
    batch.likeliest, batch.verified = 0, [[] for _ in texts]
    drafter.begin(batch)
    return batch


def test_a_tree_follows_the_matrix_by_rank_and_leaves_out_what_nothing_is_known_of():
    drafter = TokenRecycling(nodes=4)
    batch = begun(drafter, [1, 2, 3, 1, 4, 1])
    assert static_tree(4) == [(0,), (1,), (0, 0), (0, 0, 0)]
    # 1 was followed by 2, and then by 4, whose successor is 1
    assert drafter.tree_of(batch, 0) == ([4, 2, 1, 4], [0, 0, 1, 3])
    batch.verified[0] += [(1, [7, 8, 9]), (8, [1])]
    assert drafter.tree_of(batch, 0) == ([7, 8], [0, 0])  # nothing is known of 7
    assert not batch.verified[0]
    batch.texts[0] = [6, 1]
    assert drafter.tree_of(batch, 0) == ([], [])  # another prompt has taken the row


def test_the_static_tree_begins_with_the_likeliest_tokens():
    assert tree_chances(3) == pytest.approx([RIGHT[0], RIGHT[0] ** 2, RIGHT[1]])


def test_rows_of_a_batch_draft_what_pays(measured_budget):
    texts, nodes = [[1, 2, 3, 1, 2, 3]] * 2, []
    for node in (0.0, 0.05, 1.0):
        drafter = TokenRecycling(nodes=3)
        batch = begun(drafter, *texts, costs=VerifyCosts([2, 4], [1.0, 1.0 + 2 * node]))
        nodes.append(len(drafter.tree_of(batch, 1)[0]))
    assert nodes == [2, 1, 0]


@pytest.mark.parametrize("compiled", [False, True])
def test_every_verified_node_says_the_targets_likeliest_tokens(compiled):
    lm = tiny()
    lm = lm.compile_for_decoding() if compiled else lm
    engine = Engine(lm, TokenRecycling(9), always_drafts=True)
    batch = engine.open(2, 80, Sampling(temperature=1.0))
    for row, prompt in enumerate(PROMPTS[:2]):
        engine.admit(batch, row, Request(prompt * 2, 12))
    nodes = 0
    for _ in range(6):
        trees = [engine.drafter.tree_of(batch, row) for row in range(2)]
        texts = [list(text) for text in batch.texts]
        engine.step(batch)
        for text, (tokens, parents), verified in zip(texts, trees, batch.verified, strict=True):
            paths = [text]
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*paths[parent], token])
            assert [token for token, _ in verified] == [path[-1] for path in paths]
            for path, (_, likeliest) in zip(paths, verified, strict=True):
                expected = forward_logits(lm, path)[-1].topk(len(RIGHT)).indices
                assert likeliest == expected.tolist()
            nodes += len(tokens)
    assert nodes > 10


def rounds(engine: Engine, batch_size: int) -> list[list[tuple[list[int], int]]]:
    """Of each text, what each step wrote and drafted."""
    done = engine.generate(PROMPTS, 20, Sampling(), batch_size)
    return [[(step.tokens, step.drafted) for step in text.steps] for text in done]


def test_a_text_takes_the_same_rounds_alone_and_in_a_batch():
    lm = tiny().compile_for_decoding()
    engine = Engine(lm, TokenRecycling(6), always_drafts=True)
    alone = rounds(engine, 1)
    assert rounds(engine, len(PROMPTS)) == alone == rounds(engine, 1)
