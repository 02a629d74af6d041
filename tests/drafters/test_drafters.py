"""What Kangaroo drafts, a chain or a tree, and where it stops, against the definition. That every
drafter is lossless: `test_conformance.py`.

Shapes: B rows, N draft nodes.
"""

from dataclasses import replace

import pytest
import torch
from cases import (
    CHUNK,
    NEW_TOKENS,
    PROMPTS,
    SAMPLINGS,
    Case,
    accepted,
    choices_without_cache,
    drafted_without_cache,
)
from helpers import adapter_for, check_chains, check_drafts, paths_of

from kangaroo.drafters import chain as chain_file
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree, KangarooTreeConfig, kept
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.utils.errors import ConfigError

SAMPLED = SAMPLINGS["sampled"]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("threshold", [0, 0.4])
def test_kangaroo_drafts_what_its_adapter_would_with_the_whole_text_before_it(
    case, sampling, threshold, layers
):
    parts = AdapterHeadConfig(attention_layers=layers)
    case = replace(case, adapter=adapter_for(case.lm, architecture=parts))
    drafter = Kangaroo(case.lm, case.adapter, steps=3, threshold=threshold)
    lengths = check_chains(
        drafter, lambda text, seed, count: drafted_without_cache(case, text, count, sampling, seed)
    )
    engine = Engine(case.lm, drafter, prefill_chunk=CHUNK)
    done = engine.generate(PROMPTS, NEW_TOKENS, sampling, batch_size=2)
    # rounds that were accepted whole and rounds that were not both lie behind later drafts
    whole = [s.accepted == s.drafted for generation in done for s in generation.steps]
    assert set(whole) == {False, True}
    assert lengths == ({3} if threshold == 0 else {1, 2, 3})


def test_low_confidence_token_is_still_verified(case):
    drafter = Kangaroo(case.lm, case.adapter, steps=6, threshold=0.9999)
    done = Engine(case.lm, drafter).generate(PROMPTS, NEW_TOKENS, SAMPLED)
    steps = [step for generation in done for step in generation.steps[1:]]
    assert {step.drafted for step in steps} == {1}  # nothing was confident enough for a second
    assert sum(step.accepted for step in steps) > len(steps) // 4


@pytest.mark.parametrize("rows", [1, 3])
def test_drafting_stops_exactly_where_confidence_falls_to_the_threshold(case, monkeypatch, rows):
    """In every row of a batch, whatever the others do."""
    of_rows = [0.9, 0.7, 0.5, 0.9, 0.9, 0.9], [0.9] * 6, [0.4, 0.9, 0.9, 0.9, 0.9, 0.9]
    after_tokens = iter(torch.tensor(of_rows[:rows]).T)
    monkeypatch.setattr(chain_file, "confidence", lambda logits_BK: next(after_tokens))
    drafter = Kangaroo(case.lm, case.adapter, steps=6, threshold=0.5)  # 0.5 itself stops
    engine = Engine(case.lm, drafter)
    batch = engine.open(rows, 60, SAMPLED)
    for row in range(rows):
        engine.admit(batch, row, Request(PROMPTS[row], 15, seed=row))
    records = engine.step(batch)
    assert [record.drafted for record in records] == [3, 6, 1][:rows]
    assert len(list(after_tokens)) == (3 if rows == 1 else 0)  # ends with the last row


def tree_by_definition(
    case: Case, text: list[int], drafter: KangarooTree, sampling: Sampling, seed: int
) -> set[tuple[int, ...]]:
    top_k, scores, level = drafter.top_k, {}, {(): 1.0}
    for _ in range(drafter.steps):
        found = [
            ((*path, token), score * sure)
            for path, score in level.items()
            for token, sure in choices_without_cache(case, [*text, *path], sampling, seed, top_k)
        ]
        level = dict(sorted(found, key=lambda node: -node[1])[:top_k])
        scores |= level
        if max(level.values()) <= drafter.threshold:
            break
    parents = {path[:-1] for path in scores}
    childless = sorted((path for path in scores if path not in parents), key=lambda p: scores[p])
    for path in childless[: len(childless) // 2]:
        del scores[path]
    return set(sorted(scores, key=lambda path: (-scores[path], len(path)))[: drafter.nodes])


@pytest.mark.parametrize("threshold, nodes", [(0, 30), (0.2, 30), (0, 5)])
def test_the_tree_is_the_one_of_the_definition(case, sampling, threshold, nodes):
    """Also after drafts that were accepted on a branch."""
    drafter, sizes = KangarooTree(case.lm, case.adapter, 3, threshold, None, 3, nodes), set()

    def check(batch, draft, row):
        text, seed = batch.texts[row], batch.seeds[row]
        expected = tree_by_definition(case, text, drafter, sampling, seed)
        assert set(paths_of(draft, row)) - {()} == expected
        sizes.add(len(expected))

    check_drafts(drafter, check)
    assert len(accepted(drafter, case.lm, sampling)) > 2
    assert max(sizes) <= nodes and (threshold == 0 or len(sizes) > 1)


def test_pruning_keeps_parents_and_the_most_confident():
    # 0 - 1 - 3 - 5, 0 - 2, 1 - 4: childless are 2, 4 and 5
    parents_BN = torch.tensor([[0, 0, 0, 1, 1, 3]])
    score_BN = torch.tensor([[1.0, 0.6, 0.3, 0.5, 0.1, 0.4]])
    every_BN = torch.ones_like(parents_BN, dtype=torch.bool)
    root_BN, sure_BN = every_BN & (torch.arange(6) == 0), torch.ones(1, 6)  # ties: parents first

    def nodes(score_BN, valid_BN, *worth: float, halves: bool = False) -> list[int]:
        limits = torch.tensor(worth), halves
        return kept(score_BN, parents_BN, valid_BN, *limits)[0].nonzero()[:, 0].tolist()

    assert nodes(score_BN, every_BN, *[0.0] * 9, halves=True) == [0, 1, 2, 3, 5]
    assert nodes(score_BN, every_BN, 0.0, 0.0, halves=True) == [0, 1, 3]
    assert nodes(score_BN, every_BN, 0.05, 0.05) == [0, 1, 3]
    assert nodes(score_BN, root_BN, *[0.0] * 9, halves=True) == [0]
    assert nodes(score_BN, every_BN, *[0.3] * 9) == [0, 1, 3, 5]
    assert nodes(score_BN, every_BN, 0.7, 0.3, 0.3, 0.5) == [0, 1, 3, 5]  # together they pay
    assert nodes(sure_BN, every_BN, 0.0) == [0, 1]


def test_trees_that_cannot_be_are_refused_by_name(case):
    with pytest.raises(ConfigError, match=r"top_k=65 is more than the 64 tokens"):
        KangarooTree(case.lm, case.adapter, top_k=65)
    with pytest.raises(ConfigError, match=r"top_k=10, drafter.steps=103 make 1030 nodes"):
        KangarooTreeConfig(top_k=10, steps=103)
