"""Training: the order of samples, micro-batches, and the path that decoding takes."""

import math

import pytest
import torch
import training_cases
from helpers import adapter_for, admit_text, random_prompts, tiny
from training_cases import VARIANTS, config, recipe, sample, samples, taught, train

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.heads.adapter_files import WEIGHTS
from kangaroo.training.batches import check_trainable, collate, plan, row_width
from kangaroo.training.config import schedule
from kangaroo.training.micro_batch import forward_target, grade
from kangaroo.training.recipe import trainees
from kangaroo.utils.errors import DataError

nothing_is_drawn = pytest.fixture(autouse=True)(training_cases.nothing_is_drawn)


def test_learning_rate_warms_up_peaks_once_and_ends_at_zero():
    settings = config(warmup_steps=4)
    rates = [schedule(settings, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert math.isclose(rates[12], 0.5) and rates[-1] < 0.01
    assert schedule(settings, 0, 1) == 1.0  # a run shorter than its warm-up


def test_an_epoch_holds_every_sample_once_in_batches_that_fit_with_hardly_any_padding():
    """Lengths as of ShareGPT's conversations, and one sample that fits alone."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1000, generator=generator) * 0.9 + 7).exp()
    lengths = [max(16, int(length)) for length in drawn.clamp(max=2048).tolist()] + [9000]
    batches = plan(lengths, batch_tokens=8192, seed=0, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    padded = [len(batch) * max(lengths[i] for i in batch) for batch in batches]
    assert sorted(padded)[-1] == 9000 and sorted(padded)[-2] <= 8192
    assert sum(lengths) > 0.985 * sum(padded)
    assert batches == plan(lengths, 8192, seed=0, epoch=0)
    assert batches != plan(lengths, 8192, seed=0, epoch=1)
    assert batches != plan(lengths, 8192, seed=1, epoch=0)


@pytest.mark.parametrize("step", [1, 4])
def test_a_remembered_micro_batch_has_the_same_place_in_a_step(step):
    """So it meets the process that has it: `Ranks.scatter` goes by places."""
    lengths = list(range(10, 60))
    first = plan(lengths, batch_tokens=64, seed=0, epoch=0, same=step)
    place = {tuple(batch): i % step for i, batch in enumerate(first)}
    assert len(first) % 4 and first == plan(lengths, 64, seed=0, epoch=0)
    for epoch in (1, 2):
        later = plan(lengths, 64, seed=0, epoch=epoch, same=step)
        assert later != first and sorted(later) == sorted(first)
        at = [(epoch * len(first) + i) % step for i in range(len(later))]
        moved = sum(place[tuple(batch)] != where for batch, where in zip(later, at, strict=True))
        assert moved < step


def test_wanted_positions_are_those_before_a_token_of_the_assistant():
    two_turns = sample([1, 2, 3, 4, 5, 6, 7], 0) | {"loss_mask": [0, 0, 1, 1, 0, 0, 1]}
    tokens = collate([two_turns, sample([8, 9], 1)], 100, torch.device("cpu"))
    assert tokens.wanted_BT.tolist() == [
        [False, True, True, False, False, True, False],
        [True, False, False, False, False, False, False],
    ]


def test_rows_are_aligned_on_a_gpu_alone():
    widths = [row_width([9, 17], torch.device(kind)) for kind in ("cuda", "cpu")]
    assert widths == [24, 17] and row_width([16], torch.device("cuda")) == 16


def test_a_sample_without_trainable_tokens_is_refused_and_shown():
    refused = r"sample 1 has no trainable token among its first 5: .* 6 to 8\..*user: 'Why\?'"
    with pytest.raises(DataError, match=refused):
        check_trainable([sample(list(range(9)), 3), sample(list(range(9)), 6)], max_length=5)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_training_sees_what_decoding_sees(architecture):
    """The adapter's distribution at each assistant position equals the one it drafts from."""
    lm = tiny(architecture)
    (trainee,) = trainees(lm, [recipe()], None)
    trainee.adapter = adapter = adapter_for(lm)
    (ids,) = random_prompts(24)
    trained = []
    handle = adapter.register_forward_hook(lambda module, inputs, out: trained.append(out))
    tokens = collate([sample(ids[:9], 5), sample(ids, 5)], 100, lm.device)  # the first is padded
    outputs = forward_target(lm, tokens, [trainee])
    grade(lm, outputs, [trainee], loss_chunk=7, steps=1)
    handle.remove()
    learnt_TV = lm.head(trained[0][1]).softmax(-1)
    drafter = Kangaroo(lm, adapter, steps=1, threshold=0)
    engine = Engine(lm, drafter, prefill_chunk=6)
    sampling = Sampling(temperature=1.0, rule=Rule.rejection)
    for length in range(5, len(ids)):
        batch = engine.open(1, 40, sampling)
        admit_text(engine, batch, 0, ids[:length])
        drafted_V = drafter.propose(batch).probs_BNV[0, 1]
        # float32, summed in another order
        torch.testing.assert_close(learnt_TV[length - 1], drafted_V, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_gradients_do_not_depend_on_how_a_step_is_split(changes):
    lm, data = tiny(), samples(4)
    splits = [[data], [data[:1], data[1:]]]
    whole, split = (
        taught(lm, [collate(part, 100, lm.device) for part in parts], **changes)[1]
        for parts in splits
    )
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)  # float32, another order


def test_remembering_runs_the_target_in_the_first_epoch_alone_and_changes_nothing(tmp_path):
    lm, runs = tiny(), []
    data = samples(6)
    settings = config(holdout=1, batch_tokens=1000, evaluate_every=1000)  # one micro-batch an epoch
    lm.layers[0].register_forward_hook(lambda *_: runs.append(1))
    (plain,) = train(lm, data, settings, tmp_path / "plain")
    looked = len(runs)
    settings.cache_target_states = True
    (kept,) = train(lm, data, settings, tmp_path / "kept")
    assert (looked, len(runs) - looked) == (3, 2)  # two epochs, or one, and the held-out sample
    assert (plain / WEIGHTS).read_bytes() == (kept / WEIGHTS).read_bytes()
