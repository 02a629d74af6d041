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
from helpers import Sometimes

from kangaroo.drafters.cascade import Cascade, either
from kangaroo.drafters.draft_model import DraftModel
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.tree import Draft
from kangaroo.utils.errors import ConfigError

SAMPLED = SAMPLINGS["sampled"]


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama", "sampled")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("extend", [False, True])
def test_rows_are_drafted_by_the_first_or_else_the_second(case, monkeypatch, rows, extend, steps):
    """Whose caches then are as if it had drafted alone, whoever did before."""
    first = Sometimes(case.texts)
    cascade = Cascade(case.lm, first, Kangaroo(case.lm, case.adapter, steps, 0), extend)
    propose, who = cascade.propose, []

    def check(batch):
        draft = propose(batch)
        for row in range(batch.size):
            if batch.done_B[row]:
                continue
            text = batch.texts[row]
            drafted = draft.tokens_BN[row, 1:][draft.valid_BN[row, 1:]].tolist()
            found = first.continuation(row, text)
            seed = int(batch.seeds_B[row])
            own = drafted_without_cache(case, text, steps, SAMPLED, seed)
            more = first.continuation(row, text + own) if extend else []
            assert drafted == (found or own + more)
            who.append("first" if found else "extended" if more else "second")
        return draft

    monkeypatch.setattr(cascade, "propose", check)
    engine = Engine(case.lm, cascade, prefill_chunk=CHUNK)
    done = engine.generate(PROMPTS, NEW_TOKENS, SAMPLED, batch_size=rows)
    assert [p + g.tokens for p, g in zip(PROMPTS, done, strict=True)] == case.texts
    assert set(who) == {"first", "second", *(["extended"] if extend else [])}


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
    assert rounds(case, Cascade(case.lm, Vanilla(), build())) == rounds(case, build())


def test_rows_of_two_drafts_keep_their_own_trees():
    pending_B1 = torch.tensor([[5], [6]])
    chain = Draft.listed(pending_B1, [[1, 2, 3], []])
    tree = Draft.listed(pending_B1, [[7, 8], [7, 8]], [[0, 0], [0, 1]])
    draft = either(torch.tensor([True, False]), chain, tree)
    assert draft.tokens_BN.tolist() == [[5, 1, 2, 3], [6, 7, 8, 0]]
    assert draft.valid_BN.tolist() == [[True] * 4, [True, True, True, False]]
    assert draft.tree.parents_BN.tolist() == [[0, 0, 1, 2], [0, 0, 1, 0]]
    assert draft.tree.max_depth == 3 and draft.entry == 0


def test_only_what_reads_text_can_go_on_from_a_draft(case):
    with pytest.raises(ConfigError, match="extend=true"):
        Cascade(case.lm, Vanilla(), Kangaroo(case.lm, case.adapter), extend=True)
