"""The search for layers to skip: what a subset is worth, and which is found."""

import pytest
from helpers import random_prompts, tiny, vanilla_texts

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
    drafter = DraftVerify(lm, skip, steps=1, threshold=0)
    right = total = 0
    for sample, prompt in zip(samples, PROMPTS, strict=True):
        text = sample["input_ids"]
        # the prefill gives a text's last token, and one step drafts what follows it
        for length in range(len(prompt), len(text) - 1):
            (done,) = Engine(lm, drafter).generate([text[:length]], 2)
            right, total = right + done.steps[1].accepted, total + 1
    masks = [[0] * (len(prompt) + 1) + [1] * 29 for prompt in PROMPTS]
    judged = [sample | {"loss_mask": m} for sample, m in zip(samples, masks, strict=True)]
    share = agreement_of(lm, [look(lm, sample, 512) for sample in judged], skip)
    assert 0 < right < total == 3 * 29 and right == round(share * total)


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
    assert found(str(tmp_path / "best.json")) == best
