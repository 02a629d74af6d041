"""What a training run tells: decoding beside teacher forcing, names, the table and the plot."""

import json
from itertools import takewhile

import pytest
import torch
import training_cases
from cases import Case, drafted_without_cache
from helpers import EXIT, adapter_for, random_prompts, tiny, vanilla_texts
from training_cases import config, recipe, run, sample, samples

from kangaroo.drafters.eagle import EagleConfig
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation import metrics as evaluation
from kangaroo.heads.adapter_files import WEIGHTS, read_config
from kangaroo.heads.eagle_head import EagleHeadConfig
from kangaroo.training import results
from kangaroo.training.batches import collate, forward_target, grade
from kangaroo.training.recipe import trainees
from kangaroo.training.results import METRICS, decode, decode_prompts, frozen_copy, read_metrics
from kangaroo.utils.errors import DataError

nothing_is_drawn = pytest.fixture(training_cases.nothing_is_drawn)
VARIANTS = [{}, {"fused": True}, {"own_head": True}, {"architecture": EagleHeadConfig()}]
MEANS = ["loss", "agreement", "expected_acceptance"]
RATES = [f"ctar{w}" for w in range(1, 7)] + ["compression_rate"]


def trained(lm, **changes):
    """An adapter that agrees here and there, with values that saving does not round."""
    (trainee,) = trainees(lm, [recipe(**changes)], None)
    adapter = adapter_for(lm, EXIT, trainee.recipe.architecture).bfloat16().float()
    trainee.adapter.load_state_dict(adapter.state_dict())
    return trainee


def test_accepted_are_the_tokens_that_drafts_begun_at_every_position_would_get_right():
    """Along texts that decoding writes, so that its rounds are among these drafts."""
    lm = tiny()
    trainee = trained(lm)
    prompts = random_prompts(5, 14, seed=3)
    texts = vanilla_texts(lm, prompts, 25)
    data = [sample(text, len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
    tokens = collate(data, 1000, lm.device)
    (steps,) = grade(lm, forward_target(lm, tokens, [trainee]), [trainee], 7, results.STEPS)
    case, counts = Case(lm, trainee.adapter, texts), []
    for text, prompt in zip(texts, prompts, strict=True):
        for start in range(len(prompt), len(text)):
            drafted = drafted_without_cache(case, text[:start], results.STEPS, Sampling(), seed=0)
            pairs = zip(drafted, text[start:], strict=False)
            counts.append(len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))))
    reached = [sum(count >= w for count in counts) for w in range(1, results.STEPS + 1)]
    assert results.count_accepted(steps, tokens.learnt_BT).tolist() == reached
    assert len(counts) > reached[0] > reached[2] > 0


@pytest.mark.parametrize(
    ("changes", "dtype"), [(x, torch.float32) for x in VARIANTS] + [({}, torch.bfloat16)], ids=str
)
@pytest.mark.usefixtures("nothing_is_drawn")
def test_what_training_decodes_is_what_the_saved_adapter_decodes(tmp_path, changes, dtype):
    lm, data = tiny(dtype=dtype), samples(8)
    folder = run(lm, tmp_path, recipe(**changes), data, vocabulary=40)
    decoded = read_config(str(folder)).training["progress"]["decoded"]
    method = EagleConfig if "architecture" in changes else KangarooConfig
    prompts = decode_prompts(data[-2:], config(decode_prompts=2, decode_tokens=12), lm.context)
    done = Engine(lm, method(adapter=str(folder), threshold=0).build(lm)).generate(prompts, 12)
    reached = evaluation.ctar([step.accepted for generation in done for step in generation.steps])
    assert [decoded[f"ctar{w}"] for w in range(1, 7)] == reached + [0.0] * (6 - len(reached))
    written = sum(len(generation.tokens) for generation in done)
    assert decoded["compression_rate"] == written / sum(len(g.steps) for g in done)


@pytest.mark.usefixtures("nothing_is_drawn")
def test_decoding_leaves_no_trace_in_training(tmp_path):
    lm = tiny()
    trainee = trained(lm, own_head=True)
    before = {name: p.clone() for name, p in trainee.adapter.named_parameters()}
    random = torch.get_rng_state()
    decode(lm, [trainee], random_prompts(5, 6), 8)
    copy, (head,) = frozen_copy(lm, trainee)
    assert head.weight_KD.data_ptr() == copy.head.weight.data_ptr()
    assert not any(p.requires_grad for p in copy.parameters())
    assert trainee.adapter.training and torch.equal(random, torch.get_rng_state())
    for name, p in trainee.adapter.named_parameters():
        assert p.requires_grad and p.dtype == torch.float32 and torch.equal(p, before[name])
    often = run(tiny(), tmp_path / "often", decode_every=1)
    never = run(tiny(), tmp_path / "never", decode_prompts=0)
    assert (often / WEIGHTS).read_bytes() == (never / WEIGHTS).read_bytes()


def test_every_metric_is_named_after_when_and_of_whom_it_was_taken(tmp_path):
    folder = run(tiny(), tmp_path, recipe(name="fused", fused=True, draft_steps=2))
    *_, last = read_metrics(tmp_path)
    name, steps = folder.name, [f"step{k}/{mean}" for k in range(2, 7) for mean in MEANS]
    assert set(last) == {
        *("step", "tokens", "tokens_per_second", "peak_memory_gib"),
        *(f"train/{name}/{figure}" for figure in [*MEANS, *steps[:3], "learning_rate"]),
        *(f"held_out/{name}/{figure}" for figure in MEANS + steps + RATES),
        *(f"decode/{name}/{figure}" for figure in RATES),
    }
    assert 0.05 < last["peak_memory_gib"] < 100
    progress = read_config(str(folder)).training["progress"]
    assert set(progress["held_out"]) == {*MEANS, *steps, *RATES}
    assert set(progress["decoded"]) == set(RATES)
    assert progress["tokens"] == last["tokens"]
    assert (tmp_path / results.CURVES).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("nothing_is_drawn")
def test_answers_too_short_for_a_draft_step_leave_its_metrics_out(tmp_path):
    data = [sample(ids, len(ids) - 1) for ids in random_prompts(*range(5, 13))]
    folder = run(tiny(), tmp_path, recipe(fused=True, draft_steps=2), data)
    *_, last = read_metrics(tmp_path)
    assert f"train/{folder.name}/loss" in last and f"train/{folder.name}/step2/loss" not in last


def test_a_run_that_is_still_writing_can_be_drawn(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        results.write_curves(tmp_path)
    whole = {"step": 1, "train/a/loss": 2.0}
    (tmp_path / METRICS).write_text(json.dumps(whole) + '\n{"step": 2, "train/a/lo')
    results.write_curves(tmp_path)
    assert (tmp_path / results.CURVES).is_file()
