"""Two drafters in one: who drafts where, and that each follows what the other drafted."""

from __future__ import annotations

import pytest
import torch
from cases import (
    CHUNK,
    NEW_TOKENS,
    PROMPTS,
    SAMPLINGS,
    Case,
    case_of,
    draft_lm,
    drafted_without_cache,
)
from helpers import Sometimes, check_chains

from kangaroo.drafters.cascade import Cascade, either
from kangaroo.drafters.draft_model import DraftModel
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.tree import Draft

SAMPLED = SAMPLINGS["sampled"]


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama", "sampled")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("steps", [1, 2])
def test_rows_are_drafted_by_the_first_or_else_the_second(case, rows, steps):
    """Whose caches then are as if it had drafted alone, whoever did before."""
    first, who = Sometimes(case.texts), set()
    cascade = Cascade(first, Kangaroo(case.lm, case.adapter, steps, 0))

    def expected(text: list[int], seed: int, count: int) -> list[int]:
        found = first.continuation(0, text)
        who.add("first" if found else "second")
        return found or drafted_without_cache(case, text, steps, SAMPLED, seed)

    check_chains(cascade, expected)
    engine = Engine(case.lm, cascade, prefill_chunk=CHUNK)
    done = engine.generate(PROMPTS, NEW_TOKENS, SAMPLED, batch_size=rows)
    assert [p + g.tokens for p, g in zip(PROMPTS, done, strict=True)] == case.texts
    assert who == {"first", "second"}


def rounds(case: Case, drafter) -> list[list[int]]:
    done = Engine(case.lm, drafter).generate(PROMPTS, NEW_TOKENS, SAMPLED)
    return [[len(step.tokens) for step in generation.steps] for generation in done]


@pytest.mark.parametrize("second", ["kangaroo", "tree", "model"])
def test_a_first_that_finds_nothing_changes_nothing(case, second):
    build = {
        "kangaroo": lambda: Kangaroo(case.lm, case.adapter, 4, 0.3),
        "tree": lambda: KangarooTree(case.lm, case.adapter, 3, 0.2, None, 3),
        "model": lambda: DraftModel(case.lm, draft_lm(case), 3),
    }[second]
    assert rounds(case, Cascade(Vanilla(), build())) == rounds(case, build())


def test_rows_of_two_drafts_keep_their_own_trees():
    pending_B1 = torch.tensor([[5], [6]])
    chain = Draft.listed(pending_B1, [[1, 2, 3], []])
    tree = Draft.listed(pending_B1, [[7, 8], [7, 8]], [[0, 0], [0, 1]])
    draft = either(torch.tensor([True, False]), chain, tree)
    assert draft.tokens_BN.tolist() == [[5, 1, 2, 3], [6, 7, 8, 0]]
    assert draft.valid_BN.tolist() == [[True] * 4, [True, True, True, False]]
    assert draft.tree.parents_BN.tolist() == [[0, 0, 1, 2], [0, 0, 1, 0]]
    assert draft.tree.max_depth == 3 and draft.entry == 0
