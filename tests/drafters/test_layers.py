"""Layers that are left out, chosen while decoding (SWIFT's search, CLaSp's programme) or before;
and half layers.

Shapes: B rows, D hidden size.
"""

from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from cases import SAMPLINGS, accepted, filled, rounds_of, written_by_some
from helpers import random_prompts, tiny, tiny_model, vanilla_texts

from kangaroo import ClaspConfig, ConfigError
from kangaroo.drafters import layer_search
from kangaroo.drafters.draft_verify import DraftVerify
from kangaroo.drafters.layer_search import agreement_of, expected_speedup, judge, runs
from kangaroo.drafters.swift import HalfLayers, Swift, SwiftConfig, evenly
from kangaroo.engine.engine import Engine
from kangaroo.models.target import TargetModel

TALKS = random_prompts(6, 9, 12)


@torch.no_grad()
def skipped_by_definition(lm, text, count):
    """CLaSp's recursion on dictionaries, a state at a time."""
    cache, meta = filled(lm, text)

    def through(layer, x_11D):
        return lm.run(x_11D, cache, meta, range(layer, layer + 1))[0]

    def cosine(x_11D, y_11D):
        return float(torch.cosine_similarity(x_11D[0, 0], y_11D[0, 0], 0))

    whole = lm.embed(torch.tensor([text[-1:]]))
    best = {0: (whole, ())}  # by the number of skipped layers so far: state, and which they are
    for layer in range(lm.n_layers):
        whole, choices = through(layer, whole), defaultdict(list)
        for skips, (state, skip) in best.items():
            choices[skips].append((through(layer, state), skip))
            choices[skips + 1].append((state, (*skip, layer)))
        best = {n: max(c, key=lambda x: cosine(x[0], whole)) for n, c in choices.items()}
    return best[count][1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_clasp_skips_what_the_recursion_says(monkeypatch, sampling, count):
    lm, sets = tiny(num_hidden_layers=6, deep_scale=0.5).compile_for_decoding(), set()
    drafter = ClaspConfig(skip_share=count / 6, steps=3, threshold=0).build(lm)
    improve = drafter.improve

    def check(batch, choices):
        improve(batch, choices)
        for row, choice in choices.items():
            assert choice.skip == skipped_by_definition(lm, batch.texts[row][:-1], count)
            sets.add(choice.skip)

    monkeypatch.setattr(drafter, "improve", check)
    accepted(drafter, lm, sampling)
    assert len(sets) > 1


def test_clasp_chooses_again_after_an_interval(monkeypatch):
    lm, lengths = tiny(), []
    drafter = ClaspConfig(interval=5, steps=2, threshold=0).build(lm)
    plan = drafter.programme
    monkeypatch.setattr(drafter, "programme", lambda b: lengths.append(len(b.texts[0])) or plan(b))
    Engine(lm, drafter).generate(random_prompts(4), 30)
    assert lengths[0] == 5
    assert all(5 <= after - before < 8 for before, after in pairwise(lengths))


def test_swift_keeps_the_best_set_by_the_tokens_that_were_written(monkeypatch, sampling):
    lm = tiny(num_hidden_layers=6, deep_scale=0.7).compile_for_decoding()
    improved, searches = [], []
    drafter = SwiftConfig(window=10, steps=3, threshold=0, goal=1.0).build(lm)
    measure, layered = drafter.matchness, drafter.layered

    def check(batch, row, skip, count):
        text, seed = batch.texts[row], batch.seeds[row]
        search = drafter.rows.get(row, text)
        assert 8 <= count == min(10, len(text) - search.prompt_tokens)
        right = measure(batch, row, skip, count)
        places = range(len(text) - count, len(text))
        expected = written_by_some(lm, runs(skip, layered.n_layers), sampling, layered)
        assert right == sum(expected(text[:i], seed, 1) == [text[i]] for i in places) / count
        improved.append(expected_speedup(right, drafter.cost_without(skip), 3) >= search.speedup)
        searches.append(search)
        return right

    monkeypatch.setattr(drafter, "matchness", check)
    Engine(lm, drafter, always_drafts=True).generate(random_prompts(9, 20), 28, sampling)
    assert any(improved) and not all(improved)
    assert any(search.skip != drafter.first for search in searches)


@pytest.mark.parametrize("config", [SwiftConfig, ClaspConfig])
def test_a_text_drafts_alike_alone_after_others_and_beside_them(monkeypatch, config):
    """Each row chooses for itself, by its text alone, and begins anew with the next."""
    lm = tiny(num_hidden_layers=6, deep_scale=0.7).compile_for_decoding()
    drafter, differing, rounds = config(steps=3, threshold=0).build(lm), [], []
    choose, seeds = drafter.choose_runs, range(7, 10)

    def observed(skips, batch):
        differing.append(len(set(skips.values())) > 1)
        return choose(skips, batch)

    monkeypatch.setattr(drafter, "choose_runs", observed)
    for rows in (1, 3, 2):
        engine = Engine(lm, drafter, always_drafts=True)
        done = engine.generate(random_prompts(9, 20, 14), 24, SAMPLINGS["sampled"], rows, seeds)
        rounds.append(rounds_of(done))
    assert rounds[0] == rounds[1] == rounds[2] and any(differing)
    assert max(drafted for text in rounds[0] for *_, drafted in text) == 3


def test_swift_ends_its_search_at_its_goal_and_after_its_proposals():
    lm = tiny()
    for options in ({"goal": 0.0}, {"proposals": 3}, {"proposals": 0}):
        drafter = SwiftConfig(steps=2, threshold=0, **options).build(lm)
        engine = Engine(lm, drafter)
        engine.generate(random_prompts(5), 40)
        of_row = drafter.rows.get(0, engine.session.batch.texts[0])
        assert of_row.proposals_left == 0 and len(of_row.tried) <= options.get("proposals", 1)


def test_the_first_set_is_evenly_spaced_and_keeps_the_outer_layers():
    assert evenly(range(2, 18), 0.2, 20) == (4, 8, 12, 16)
    assert evenly(range(2, 6), 0.45, 8) == (2, 3, 4, 5)
    assert evenly(range(2, 2), 0.45, 4) == ()
    assert isinstance(SwiftConfig().build(tiny(num_hidden_layers=2)), Swift)


@pytest.mark.parametrize("share", [0.05, 0.95])
def test_a_share_of_no_layer_or_of_all_is_refused(share):
    with pytest.raises(ConfigError, match=r"drafter\.skip_share=.* of the target's 4 layers"):
        ClaspConfig(skip_share=share).build(tiny())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@torch.no_grad()
def test_half_layers_are_the_parts_of_a_layer(family, compiled):
    lm = TargetModel(tiny_model(family))
    lm = lm.compile_for_decoding() if compiled else lm
    cut, (text,) = HalfLayers(lm), random_prompts(9)
    cache, meta = filled(lm, text)
    first_11D = x_11D = lm.embed(torch.tensor([text[-1:]]))
    for index, layer in enumerate(lm.layers):
        whole, _ = lm.run(x_11D, cache, meta, range(index, index + 1))
        attended, _ = cut.run(x_11D, cache, meta, range(2 * index, 2 * index + 1))
        both, _ = cut.run(attended, cache, meta, range(2 * index + 1, 2 * index + 2))
        torch.testing.assert_close(both, whole)
        fed, _ = cut.run(x_11D, cache, meta, range(2 * index + 1, 2 * index + 2))
        torch.testing.assert_close(fed, x_11D + layer.mlp(layer.post_attention_layernorm(x_11D)))
        x_11D = whole
    whole, _ = cut.run(first_11D, cache, meta, range(cut.n_layers))
    torch.testing.assert_close(whole, x_11D)


@pytest.fixture(scope="module")
def lm():
    return tiny("llama", deep_scale=0.4)


@pytest.fixture(scope="module")
def samples(lm):
    return [
        {"input_ids": text, "loss_mask": [0] * len(prompt) + [1] * 30, "messages": []}
        for text, prompt in zip(vanilla_texts(lm, TALKS, 30), TALKS, strict=True)
    ]


@pytest.mark.parametrize("skip", [(1,), (2, 3)])
def test_agreement_is_how_often_decoding_accepts_one_draft_token(lm, samples, skip):
    drafter = DraftVerify(lm, skip, steps=1, threshold=0)
    right = total = 0
    for sample, prompt in zip(samples, TALKS, strict=True):
        text = sample["input_ids"]
        # the prefill gives a text's last token, and one step drafts what follows it
        for length in range(len(prompt), len(text) - 1):
            (done,) = Engine(lm, drafter).generate([text[:length]], 2)
            right, total = right + done.steps[1].accepted, total + 1
    masks = [[0] * (len(prompt) + 1) + [1] * 29 for prompt in TALKS]
    judged = [sample | {"loss_mask": m} for sample, m in zip(samples, masks, strict=True)]
    share = agreement_of(lm, [judge(lm, sample, 512) for sample in judged], skip)
    assert 0 < right < total == 3 * 29 and right == round(share * total)


def test_the_best_of_those_tried_is_found(lm, samples, tmp_path):
    config = layer_search.SearchConfig(budget=14, conversations=3)  # all subsets of four layers
    best = layer_search.search(lm, samples, config, tmp_path / "best.json")
    texts = [judge(lm, sample, 512) for sample in samples]
    subsets = [tuple(i for i in range(4) if bits >> i & 1) for bits in range(1, 15)]
    costs = {skip: layer_search.draft_cost(lm, skip) for skip in subsets}
    worth = {s: expected_speedup(agreement_of(lm, texts, s), costs[s], 6) for s in subsets}
    assert worth[tuple(best.skip)] == max(worth.values())
    assert best.search["expected_speedup"] == pytest.approx(max(worth.values()))
    assert layer_search.read(str(tmp_path / "best.json")) == best
