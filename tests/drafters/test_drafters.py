"""What Kangaroo drafts, and where it stops. That every drafter is lossless: `test_conformance.py`.

Shapes: B rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import CHUNK, NEW_TOKENS, PROMPTS, SAMPLINGS, Case, case_of, drafted_without_cache
from helpers import adapter_for, check_chains

from kangaroo.drafters import chain as chain_file
from kangaroo.drafters.chain import confidence
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.heads.adapter import AdapterHeadConfig

SAMPLED = SAMPLINGS["sampled"]


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama", "sampled")


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("threshold", [0, 0.4])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_kangaroo_drafts_what_its_adapter_would_with_the_whole_text_before_it(
    case, sampling, threshold, layers
):
    parts = AdapterHeadConfig(attention_layers=layers)
    case = replace(case, adapter=adapter_for(case.lm, architecture=parts))
    drafter = Kangaroo(case.lm, case.adapter, steps=3, threshold=threshold)
    lengths = check_chains(
        drafter,
        lambda text, seed, count: drafted_without_cache(case, text, count, sampling, seed),
    )
    engine = Engine(case.lm, drafter, prefill_chunk=CHUNK)
    done = engine.generate(PROMPTS, NEW_TOKENS, sampling, batch_size=2)
    # rounds that were accepted whole and rounds that were not both lie behind later drafts
    whole = [s.accepted == s.drafted for generation in done for s in generation.steps]
    assert set(whole) == {False, True}
    assert set(lengths) == ({3} if threshold == 0 else {1, 2, 3})


def test_low_confidence_token_is_still_verified(case):
    drafter = Kangaroo(case.lm, case.adapter, steps=6, threshold=0.9999)
    done = Engine(case.lm, drafter).generate(PROMPTS, NEW_TOKENS, SAMPLED)
    steps = [step for generation in done for step in generation.steps[1:]]
    assert {step.drafted for step in steps} == {1}  # nothing was confident enough for a second
    assert sum(step.accepted for step in steps) > len(steps) // 4


@pytest.mark.parametrize("rows", [1, 3])
def test_drafting_stops_exactly_where_confidence_falls_to_the_threshold(case, monkeypatch, rows):
    """In every row of a batch, whatever the others do."""
    scripted = [  # confidence after each drafted token, by row
        [0.9, 0.7, 0.5, 0.9, 0.9],
        [0.9, 0.9, 0.9, 0.9, 0.9],
        [0.4, 0.9, 0.9, 0.9, 0.9],
    ][:rows]
    calls = iter(range(100))

    def stub(logits_BK):
        step = next(calls)
        return torch.tensor([[*row, 0.0][step] for row in scripted])

    monkeypatch.setattr(chain_file, "confidence", stub)
    drafter = Kangaroo(case.lm, case.adapter, steps=6, threshold=0.5)  # 0.5 itself stops
    engine = Engine(case.lm, drafter)
    batch = engine.open(rows, 60, SAMPLED)
    for row in range(rows):
        engine.admit(batch, row, Request(PROMPTS[row], 15, seed=row))
    records = engine.step(batch)
    assert [record.drafted for record in records] == [3, 6, 1][:rows]
    assert next(calls) == (3 if rows == 1 else 6)  # drafting ends with the last row, or at `steps`


def test_a_row_that_has_ended_does_not_keep_the_others_drafting(case, monkeypatch):
    """However sure the drafter is of what would follow there."""
    calls = []

    def stub(logits_BK):
        calls.append(len(logits_BK))
        return torch.tensor([0.9, 0.1])

    monkeypatch.setattr(chain_file, "confidence", stub)
    engine = Engine(case.lm, Kangaroo(case.lm, case.adapter, steps=6, threshold=0.5))
    batch = engine.open(2, 60, SAMPLED)
    for row, limit in enumerate((2, 15)):
        engine.admit(batch, row, Request(PROMPTS[row], limit, seed=row))
    engine.step(batch)
    calls.clear()
    ended, going = engine.step(batch)
    assert (ended.drafted, going.drafted) == (0, 1)
    assert len(calls) == 1


def test_confidence_is_the_top_probability_before_temperature_and_filters(case, monkeypatch):
    logits_BK = torch.randn(3, 9)
    torch.testing.assert_close(confidence(logits_BK), logits_BK.softmax(-1).amax(-1))
    seen = []

    def spy(logits_BK):
        seen.append(logits_BK.clone())
        return confidence(logits_BK)

    monkeypatch.setattr(chain_file, "confidence", spy)
    drafter = Kangaroo(case.lm, case.adapter, steps=2, threshold=0.5)
    for sampling in (Sampling(), SAMPLED, Sampling(temperature=0.1, top_k=2)):
        Engine(case.lm, drafter).generate(PROMPTS[:1], 2, sampling)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
