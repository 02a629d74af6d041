"""What is kept of the target's distributions while it writes: which it is, and where it goes.

Shapes: M tokens of the assistant, K likeliest tokens, T tokens of a text, V vocabulary.
"""

from dataclasses import replace
from pathlib import Path

import data_cases
import numpy as np
import pytest
import torch
from data_cases import HEALTHY, NO_FILTERS, settings
from helpers import RandomTree, adapter_for, forward_logits, random_prompts, tiny
from helpers import vanilla_texts as texts_of

from kangaroo.cpu.stepper import CpuStepper
from kangaroo.data import store
from kangaroo.data.filters import FilterConfig, answers
from kangaroo.data.making import MixConfig
from kangaroo.data.writing import Dialogue
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import topk_logits
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request, StepRecord
from kangaroo.engine.sampling import Sampling
from kangaroo.models.loading import TINY
from kangaroo.utils.errors import CorruptFile, DataError

HALF = {"rtol": 1e-3, "atol": 1e-7}  # float16 keeps 11 bits


@pytest.fixture(scope="module")
def target():
    lm, tokenizer = data_cases.brief()
    return lm.compile_for_decoding(), tokenizer


def expect_records(lm, ids, first, records, count):
    """Those of the tokens from place `first` on, by a plain forward over the whole text."""
    p_MV = forward_logits(lm, ids)[first - 1 : len(ids) - 1].softmax(-1)
    top = p_MV.topk(count)
    assert records["tokens"].shape == records["chances"].shape == (len(ids) - first, count)
    chances_MK = torch.from_numpy(records["chances"].astype(np.float32))
    torch.testing.assert_close(chances_MK, top.values, **HALF)
    tokens_MK = torch.from_numpy(records["tokens"].astype(np.int64))
    torch.testing.assert_close(p_MV.gather(1, tokens_MK), top.values, rtol=1e-4, atol=1e-7)
    assert all(len(set(row)) == count for row in tokens_MK.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("kind", ["vanilla", "kangaroo", "tree"])
@pytest.mark.parametrize("native", [True, False])
def test_every_token_keeps_the_distribution_that_it_was_chosen_from(kind, native, temperature):
    """Whatever was drafted."""
    lm = tiny(eos_token_id=7)
    prompts = random_prompts(5, 17, 3, 11, 2)
    drafters = {
        "vanilla": lambda: Vanilla(),
        "kangaroo": lambda: Kangaroo(lm, adapter_for(lm), steps=4, threshold=0.0),
        "tree": lambda: RandomTree(lm, texts_of(lm, prompts, 30)),
    }
    if native:
        lm.compile_for_decoding()
    limits = zip(prompts, (9, 30, 1, 14, 30), strict=True)
    requests = [Request(prompt, limit, seed) for seed, (prompt, limit) in enumerate(limits)]
    engine, sampling = Engine(lm, drafters[kind]()), Sampling(temperature=temperature)
    done = dict(engine.completions(requests, sampling, 2, keep=6))
    assert isinstance(engine.stepper, CpuStepper) == (native and kind != "tree")
    for index, generation in done.items():
        assert len(generation.teacher) == len(generation.tokens) > 0
        ids = [*prompts[index], *generation.tokens]
        expect_records(lm, ids, len(prompts[index]), generation.teacher, 6)
        if temperature == 0:
            assert generation.teacher["tokens"][:, 0].tolist() == generation.tokens
    accepted = sum(step.accepted for generation in done.values() for step in generation.steps)
    assert accepted > 9 or kind == "vanilla" or temperature
    without = dict(engine.completions(requests, sampling, 2))
    assert all(generation.teacher is None for generation in without.values())
    assert all(without[i].tokens == done[i].tokens for i in done)


def written(text, numbers):
    """A generation whose records are told apart by their likeliest token."""
    tokens = np.array(numbers)[:, None]
    kept = topk_logits.records(tokens, np.ones_like(tokens), 64)
    return Generation(text, [StepRecord(text, 0, 0, 0.0, 0.0, 0.0, kept)])


def test_earlier_answers_keep_their_records_as_far_as_their_tokens_are_the_same():
    for again, expected in (([7, 8, 9], [1, 2, 3]), ([7, 5, 9], [1, 2, 0]), ([7], [1]), ([4], [1])):
        dialogue = Dialogue(0)
        dialogue.append([1, 2], [0, 0], written([7, 8, 9], [1, 2, 3]))
        assert dialogue.topk_logits["tokens"][:, 0].tolist() == [1, 2, 3]
        mask = [0, 0, *[1] * len(again), 0]
        dialogue.append([1, 2, *again, 3], mask, written([6, 6], [4, 5]))
        assert dialogue.topk_logits["tokens"][:, 0].tolist() == [*expected, 4, 5]
        known = [number > 0 for number in expected]
        assert topk_logits.known(dialogue.topk_logits).tolist() == [*known, True, True]
    dialogue = Dialogue(0)
    dialogue.append([1, 2], [0, 0], written([7, 8, 9], [1, 2, 3]))
    dialogue.append([5, 2, 7, 8, 9], [0, 0, 1, 1, 1], written([6], [4]))  # another question
    assert topk_logits.known(dialogue.topk_logits).tolist() == [False, False, False, True]


def test_the_records_of_a_dataset_are_those_of_a_forward_over_its_text(target, tmp_path):
    """And go with their samples through filters and cuts."""
    lm, _ = target
    fields = {"shards": 2, "shard_size": 6, "turns": [1, 3], "teacher": 4, "max_answer_tokens": 30}
    settings(tmp_path / "data", filters=HEALTHY, **fields).make(*target)
    samples, about = store.load(tmp_path / "data")
    assert max(len(sample["messages"]) for sample in samples) == 6
    known = []
    for sample in samples:
        ids, mask = sample["input_ids"], np.array(sample["loss_mask"], dtype=bool)
        all_MV = forward_logits(lm, ids).softmax(-1)[:-1][torch.from_numpy(mask[1:])]
        is_known = topk_logits.known(sample["teacher"])
        assert len(is_known) == mask.sum()
        known += is_known.tolist()
        _, chances_MK = topk_logits.tensors(sample["teacher"][is_known])
        top_MK = all_MV[torch.from_numpy(is_known)].topk(4).values
        torch.testing.assert_close(chances_MK, top_MK, **HALF)
        last = answers(sample["loss_mask"])[-1]
        assert is_known[-(last[1] - last[0]) :].all()  # of the last answer all are there
    assert 0.5 < np.mean(known) <= 1 and about["teacher"] == {"model": TINY, "likeliest": 4}

    whole = {str(s["messages"][0]): s for s in samples}
    strict = FilterConfig(min_answer_tokens=9, max_repetition=1, near_duplicate=1)
    settings(tmp_path / "data", filters=strict, **fields).make(*target)
    fewer, about = store.load(tmp_path / "data")
    assert any(name.startswith("later turns") for name in about["dropped"])
    for sample in fewer:
        before = whole[str(sample["messages"][0])]["teacher"]
        assert len(sample["teacher"]) == sum(sample["loss_mask"])
        assert np.array_equal(sample["teacher"], before[: len(sample["teacher"])])


def test_a_mix_keeps_what_all_parts_have_alike(target, tmp_path):
    for name, count in (("a", 4), ("b", 4), ("c", 2)):
        seed = ord(name)
        settings(tmp_path / name, seed=seed, teacher=count, filters=NO_FILTERS).make(*target)
    parts = [str(tmp_path / name) for name in "abc"]
    mix = MixConfig(path=str(tmp_path / "mix"), paths=parts[:2], filters=NO_FILTERS)
    mix.make(*target)
    samples, about = store.load(tmp_path / "mix")
    assert about["teacher"] == {"model": TINY, "likeliest": 4}
    joined = [sample for part in parts[:2] for sample in store.load(Path(part))[0]]
    whole = {str(sample["input_ids"]): sample["teacher"] for sample in joined}
    for sample in samples:
        assert np.array_equal(sample["teacher"], whole[str(sample["input_ids"])])
    replace(mix, path=str(tmp_path / "all"), paths=parts).make(*target)
    samples, about = store.load(tmp_path / "all")
    assert about["teacher"] is None and not any("teacher" in sample for sample in samples)


def test_records_that_are_not_those_of_the_samples_are_named(target, tmp_path):
    settings(tmp_path / "data", teacher=4).make(*target)
    path = tmp_path / "data" / store.RECORDS
    kept = np.load(path)
    np.save(path, kept[:-1])
    with pytest.raises(CorruptFile, match=r"records for \d+ tokens of the assistant"):
        store.load(tmp_path / "data")
    kept["chances"][3, 0] /= 2
    np.save(path, kept)
    with pytest.raises(DataError, match="not what its provenance"):
        store.load(tmp_path / "data")
    (tmp_path / "data.shards/00001.npy").unlink()
    with pytest.raises(CorruptFile, match=r"delete .*00001\.jsonl"):
        settings(tmp_path / "data", teacher=4, filters=NO_FILTERS).make(*target)


def test_shards_without_records_are_not_continued_with_them(target, tmp_path):
    settings(tmp_path / "plain").make(*target)
    assert "teacher" not in store.about(tmp_path / "plain")["settings"]
    with pytest.raises(DataError, match="teacher=None there, 4 now"):
        settings(tmp_path / "plain", teacher=4).make(*target)
