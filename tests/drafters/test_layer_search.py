"""The search for layers to skip: what a subset is worth, and that a search can be stopped."""

from __future__ import annotations

import json

import pytest
from helpers import random_prompts, tiny, vanilla_texts

from kangaroo.drafters import layer_search
from kangaroo.drafters.draft_verify import DraftVerify
from kangaroo.drafters.layer_search import (
    SearchConfig,
    agreement_of,
    draft_cost,
    expected_speedup,
    found,
    look,
    search,
)
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling

PROMPTS = random_prompts(6, 9, 12)


@pytest.fixture(scope="module")
def lm():
    return tiny("llama", deep_scale=0.4)


@pytest.fixture(scope="module")
def samples(lm):
    texts = vanilla_texts(lm, PROMPTS, 30, Sampling())
    return [
        {"input_ids": text, "loss_mask": [0] * len(prompt) + [1] * 30, "messages": []}
        for text, prompt in zip(texts, PROMPTS, strict=True)
    ]


@pytest.mark.parametrize("skip", [(1,), (2, 3), (0,)])
def test_agreement_is_how_often_decoding_accepts_one_draft_token(lm, samples, skip):
    right = total = 0
    drafter = DraftVerify(lm, skip, steps=1, threshold=0)
    for sample, prompt in zip(samples, PROMPTS, strict=True):
        for length in range(len(prompt) + 1, len(sample["input_ids"])):
            # the prefill gives the last token of the text up to here: one step drafts what follows
            text = sample["input_ids"]
            (done,) = Engine(lm, drafter).generate([text[: length - 1]], 2)
            assert done.tokens == text[length - 1 : length + 1]
            _, step = done.steps
            right += step.accepted
            total += 1
    texts = [look(lm, sample, 512) for sample in samples]
    # each text's first answer token is judged there, and here its last is not reached
    firsts = [
        look(lm, {**s, "loss_mask": mask_of(s, len(p))}, 512)
        for s, p in zip(samples, PROMPTS, strict=True)
    ]
    whole, first = (agreement_of(lm, some, skip) * count(some) for some in (texts, firsts))
    assert round(whole - first) == right and count(texts) - count(firsts) == total
    assert 0 < right < total


def mask_of(sample, start):
    return [int(i == start) for i in range(len(sample["input_ids"]))]


def count(texts) -> int:
    return sum(len(text.top_M) for text in texts)


def test_a_search_that_was_stopped_goes_on_and_ends_alike(lm, samples, tmp_path, monkeypatch):
    config = SearchConfig(budget=8, conversations=3)
    whole = search(lm, samples, config, tmp_path / "whole.json")
    assert found(str(tmp_path / "whole.json")).skip == whole.skip
    assert 0 < len(whole.skip) < 4
    calls = []

    def counted(*args):
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(args)
        return agreement_of(*args)

    monkeypatch.setattr(layer_search, "agreement_of", counted)
    with pytest.raises(KeyboardInterrupt):
        search(lm, samples, config, tmp_path / "part.json")
    tried = tmp_path / "part.tried.jsonl"
    with tried.open("a") as stream:
        stream.write('{"skip": [1')  # a kill -9 in the middle of a line
    calls.clear()
    monkeypatch.setattr(
        layer_search, "agreement_of", lambda *a: calls.append(a) or agreement_of(*a)
    )
    again = search(lm, samples, config, tmp_path / "part.json")
    assert again.skip == whole.skip and len(calls) == 3
    assert all(json.loads(line) for line in tried.read_text().splitlines())
    # other settings begin anew
    other = SearchConfig(budget=4, conversations=2)
    calls.clear()
    search(lm, samples, other, tmp_path / "part.json")
    assert len(calls) == 4


def test_the_best_of_those_tried_is_found(lm, samples, tmp_path):
    config = SearchConfig(budget=14, conversations=3)  # all subsets of four layers
    best = search(lm, samples, config, tmp_path / "best.json")
    texts = [look(lm, sample, 512) for sample in samples]
    subsets = [tuple(i for i in range(4) if bits >> i & 1) for bits in range(1, 15)]
    worth = {
        skip: expected_speedup(agreement_of(lm, texts, skip), draft_cost(lm, skip), 6)
        for skip in subsets
    }
    assert worth[tuple(best.skip)] == max(worth.values())
    assert best.search["expected_speedup"] == pytest.approx(max(worth.values()))
