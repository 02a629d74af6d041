"""Training: the loss, the order of samples, the path that decoding takes, and resuming."""

import json
import math

import pytest
import torch
from helpers import EXIT, adapter_for, random_prompts, tiny
from safetensors.torch import load_file
from torch import nn

from kangaroo.adapter import WEIGHTS
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine import Engine, Request
from kangaroo.errors import ConfigError, CorruptFile, DataError
from kangaroo.sampling import Rule, Sampling
from kangaroo.tracking import NoTracker
from kangaroo.training.batches import check_trainable, collate, frequent_tokens, plan, rows_of
from kangaroo.training.checkpoint import CHECKPOINT, METRICS
from kangaroo.training.distill import distill
from kangaroo.training.loop import TrainerConfig, learning_rate, micro_batch, train

ABOUT = {"fingerprint": "test"}


def sample(ids, prompt_length):
    mask = [0] * prompt_length + [1] * (len(ids) - prompt_length)
    return {"messages": [{"role": "user", "content": "Why?"}], "input_ids": ids, "loss_mask": mask}


def samples(count, length=20):
    return [sample(ids, 5) for ids in random_prompts(*range(length, length + count))]


def config(**changes):
    settings = {
        "exit_layers": [EXIT], "epochs": 2, "batch_tokens": 64, "holdout": 2, "loss_chunk": 7,
        "evaluate_every": 3, "save_every": 2, "warmup_steps": 2,
    }  # fmt: skip
    return TrainerConfig(**(settings | changes))


def test_learning_rate_warms_up_peaks_once_and_ends_at_zero():
    settings = config(learning_rate=1.0, warmup_steps=4)
    rates = [learning_rate(settings, step, 20) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert math.isclose(rates[12], 0.5) and rates[-1] < 0.01
    assert learning_rate(settings, 0, 1) == 1.0  # a run shorter than its warm-up


def test_an_epoch_holds_every_sample_once_in_batches_that_fit():
    lengths = [3, 50, 7, 7, 20, 9, 31, 64, 80]
    batches = plan(lengths, batch_tokens=64, seed=0, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 64
    assert batches == plan(lengths, 64, seed=0, epoch=0)
    assert batches != plan(lengths, 64, seed=0, epoch=1)
    assert batches != plan(lengths, 64, seed=1, epoch=0)


def test_packed_micro_batches_fit_and_hold_every_sample_once():
    lengths = [3, 50, 7, 7, 20, 9, 31, 64, 80]
    batches = plan(lengths, batch_tokens=64, seed=0, epoch=0, packing=True)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        rows = rows_of([lengths[i] for i in batch])
        width = max(lengths[i] for i in batch)
        assert len(batch) == 1 or len(rows) * width <= 64
        assert all(sum(lengths[batch[i]] for i in row) <= width for row in rows)
    assert batches != plan(lengths, 64, seed=0, epoch=1, packing=True)
    assert len(batches) <= len(plan(lengths, 64, seed=0, epoch=0))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_packing_changes_no_state_loss_or_gradient(architecture):
    lm = tiny(architecture)
    data = [sample(ids, 3) for ids in random_prompts(20, 5, 8, 6, 20, 11, 9, seed=1)]
    packed = collate(data, 100, lm.device, packing=True)
    assert len(packed.input_BT) == 4 and packed.input_BT.numel() == 80  # of 79 tokens

    def run(tokens):
        x_BTD, _ = lm.run(lm.embed(tokens.input_BT), None, tokens.block(lm), range(lm.n_layers))
        return x_BTD

    together_BTD = run(packed)
    for index, one in enumerate(data):
        alone_TD = run(collate([one], 100, lm.device))[0]
        # float32, attention summed in another order
        torch.testing.assert_close(
            together_BTD[packed.sample_BT == index], alone_TD, rtol=1e-4, atol=1e-5
        )

    def trained(packing):
        adapter = adapter_for(lm).requires_grad_()
        (scores,) = micro_batch(lm, [adapter], data, config(packing=packing), weight=0.01)
        return scores, [parameter.grad for parameter in adapter.parameters()]

    (one, gradients), (other, others) = trained(False), trained(True)
    assert one.positions == other.positions == sum(sum(s["loss_mask"]) for s in data)
    assert math.isclose(one.loss, other.loss, rel_tol=1e-5)
    for gradient, packed_gradient in zip(gradients, others, strict=True):
        torch.testing.assert_close(gradient, packed_gradient, rtol=1e-3, atol=1e-5)


def test_a_packed_token_does_not_depend_on_the_samples_before_it():
    lm = tiny()
    first, other, last = (sample(ids, 3) for ids in random_prompts(12, 12, 9, seed=2))
    wide = sample(random_prompts(21)[0], 3)  # makes rows wide enough for two
    states = []
    for before in (first, other):
        tokens = collate([wide, before, last], 100, lm.device, packing=True)
        x_BTD, _ = lm.run(lm.embed(tokens.input_BT), None, tokens.block(lm), range(lm.n_layers))
        assert tokens.sample_BT[1].tolist() == [1] * 12 + [2] * 9
        assert tokens.block(lm).positions_RT[1].tolist() == [*range(12), *range(9)]
        states.append(x_BTD[1, 12:])
    assert torch.equal(*states)


def test_a_float32_adapter_trains_on_packed_rows_of_a_bfloat16_target():
    lm = tiny(dtype=torch.bfloat16)
    adapter = adapter_for(lm).float().requires_grad_()
    data = [*samples(3, length=9), sample(random_prompts(21)[0], 3)]
    (scores,) = micro_batch(lm, [adapter], data, config(packing=True), weight=0.01)
    assert math.isfinite(scores.loss) and all(p.grad is not None for p in adapter.parameters())


def test_a_packed_run_trains_and_resumes(tmp_path):
    def run(name, tracker):
        settings = config(packing=True, batch_tokens=128)
        return train(tiny(), samples(12), settings, tmp_path / name, tracker, ABOUT)

    (whole,) = run("whole", NoTracker())
    with pytest.raises(Killed):
        run("stopped", KillsAt(3))
    (stopped,) = run("stopped", NoTracker())
    assert (whole / WEIGHTS).read_bytes() == (stopped / WEIGHTS).read_bytes()


def test_wanted_positions_are_those_before_a_token_of_the_assistant():
    two_turns = sample([1, 2, 3, 4, 5, 6, 7], 0) | {"loss_mask": [0, 0, 1, 1, 0, 0, 1]}
    tokens = collate([two_turns, sample([8, 9], 1)], 100, torch.device("cpu"))
    assert tokens.wanted_BT.tolist() == [
        [False, True, True, False, False, True, False],
        [True, False, False, False, False, False, False],
    ]


def test_a_sample_without_trainable_tokens_is_refused_and_shown():
    with pytest.raises(
        DataError,
        match=r"sample 1 has no trainable token among its first 5: .* 6 to 8 .*user: 'Why\?'",
    ):
        check_trainable([sample(list(range(9)), 3), sample(list(range(9)), 6)], max_length=5)


def test_the_chunked_loss_and_its_gradient_equal_the_whole():
    lm = tiny()
    teacher, student = torch.randn(2, 11, lm.config.hidden_size).unbind()
    whole = student.clone().requires_grad_()
    p, log_q = lm.head(teacher).softmax(-1), lm.head(whole).log_softmax(-1)
    loss = -(p * log_q).sum()
    (gradient,) = torch.autograd.grad(loss, whole)
    scores, chunked = distill(lm, teacher, student, chunk_size=4, backward=True)
    torch.testing.assert_close(chunked, gradient)
    assert math.isclose(scores.loss, loss.item(), rel_tol=1e-5)
    assert scores.positions == 11
    assert scores.agreement == (p.argmax(-1) == log_q.argmax(-1)).sum()
    assert math.isclose(scores.acceptance, torch.minimum(p, log_q.exp()).sum().item(), rel_tol=1e-5)


def test_logits_never_stand_whole_in_memory():
    lm, seen = tiny(), []
    lm.head.register_forward_hook(lambda head, inputs, out: seen.append(out.shape[:-1].numel()))
    micro_batch(lm, [adapter_for(lm).requires_grad_()], samples(3), config(), weight=1.0)
    assert max(seen) == 7 and sum(seen) == 2 * (15 + 16 + 17)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_training_sees_what_decoding_sees(architecture):
    """The adapter's distribution at each assistant position equals the one it drafts from."""
    lm = tiny(architecture)
    adapter = adapter_for(lm)
    (ids,) = random_prompts(24)
    trained = []
    handle = adapter.register_forward_hook(lambda module, inputs, out: trained.append(out))
    short = sample(ids[:9], 5)  # padded beside the longer one
    micro_batch(lm, [adapter], [short, sample(ids, 5)], config(), weight=None)
    handle.remove()
    learnt_TV = lm.head(trained[0][1]).softmax(-1)
    drafter = Kangaroo(lm, adapter, steps=1, threshold=0)
    engine = Engine(lm, drafter, prefill_chunk=6)
    sampling = Sampling(temperature=1.0, rule=Rule.rejection)
    for length in range(5, len(ids)):
        batch = engine.open(1, 40, sampling)
        engine.admit(batch, 0, Request(ids[:length], 4))
        drafted_V = drafter.propose(batch).probs_BNV[0, 1]
        # float32, summed in another order
        torch.testing.assert_close(learnt_TV[length - 1], drafted_V, rtol=1e-4, atol=1e-6)


def test_gradients_do_not_depend_on_how_a_step_is_split():
    lm, data = tiny(), samples(4)

    def gradients(batches):
        adapter = adapter_for(lm).requires_grad_()
        for batch in batches:
            micro_batch(lm, [adapter], batch, config(), weight=0.01)
        return [parameter.grad for parameter in adapter.parameters()]

    for one, split in zip(gradients([data]), gradients([data[:1], data[1:]]), strict=True):
        torch.testing.assert_close(one, split, rtol=1e-4, atol=1e-6)  # float32, another order


def test_accumulation_takes_that_many_micro_batches_a_step(tmp_path):
    steps = {}
    for accumulate in (1, 3):
        folder = tmp_path / str(accumulate)
        train(tiny(), samples(11), config(accumulate=accumulate), folder, NoTracker(), ABOUT)
        steps[accumulate] = len((folder / METRICS).read_text().splitlines())
    assert steps[3] == math.ceil(steps[1] / 3)


def test_frequent_tokens_are_those_of_the_assistant_in_order():
    some = [sample([9, 9, 5, 4, 5, 4, 8], 2), sample([1, 4], 1)]
    assert frequent_tokens(some).tolist() == [4, 5, 8]


def test_only_the_adapter_is_trained_and_it_learns(tmp_path):
    lm = tiny(deep_scale=1.0)
    before = {name: p.clone() for name, p in lm.hf.named_parameters()}
    settings = config(epochs=12, holdout=1, learning_rate=1e-2)
    (folder,) = train(lm, samples(5), settings, tmp_path, NoTracker(), ABOUT)
    assert all(torch.equal(p, before[name]) for name, p in lm.hf.named_parameters())
    losses = [
        json.loads(line)[f"train/exit{EXIT}/loss"]
        for line in (tmp_path / METRICS).read_text().splitlines()
    ]
    assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.2  # most of the rest is the teacher's own
    saved = json.loads((folder / "config.json").read_text())
    assert saved["exit_layer"] == EXIT and saved["training"]["data"] == ABOUT
    assert f"held_out/exit{EXIT}/agreement" in saved["training"]["held_out"]


def test_several_exits_train_as_if_each_were_alone(tmp_path):
    train(tiny(), samples(8), config(exit_layers=[1, 2]), tmp_path / "both", NoTracker(), ABOUT)
    train(tiny(), samples(8), config(exit_layers=[2]), tmp_path / "alone", NoTracker(), ABOUT)
    both, alone = (load_file(tmp_path / run / "exit2" / WEIGHTS) for run in ("both", "alone"))
    assert all(torch.equal(both[name], alone[name]) for name in alone)


class Killed(Exception):
    pass


class KillsAt(NoTracker):
    """Stops the run in the middle, after a step that no checkpoint holds."""

    def __init__(self, step):
        self.step = step

    def log(self, metrics, step):
        if step == self.step:
            raise Killed


def test_an_interrupted_run_ends_with_the_same_weights_and_metrics(tmp_path):
    def run(name, tracker):
        return train(tiny(), samples(12), config(), tmp_path / name, tracker, ABOUT)

    (whole,) = run("whole", NoTracker())
    for step in (1, 5, 8):
        with pytest.raises(Killed):
            run("stopped", KillsAt(step))
    with (tmp_path / "stopped" / METRICS).open("a") as file:
        file.write('{"step": 9, "torn')
    (stopped,) = run("stopped", NoTracker())
    one, other = load_file(whole / WEIGHTS), load_file(stopped / WEIGHTS)
    assert all(torch.equal(one[name], other[name]) for name in one)

    def metrics(name):
        rows = [json.loads(line) for line in (tmp_path / name / METRICS).read_text().splitlines()]
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]

    assert metrics("whole") == metrics("stopped")


def test_a_folder_of_other_settings_or_data_is_refused_by_name(tmp_path):
    train(tiny(), samples(6), config(), tmp_path, NoTracker(), ABOUT)
    with pytest.raises(ConfigError, match=r"learning_rate=0\.01 there, 0\.1 now"):
        train(tiny(), samples(6), config(learning_rate=0.1), tmp_path, NoTracker(), ABOUT)
    with pytest.raises(ConfigError, match="data='test' there, 'other' now"):
        train(tiny(), samples(6), config(), tmp_path, NoTracker(), {"fingerprint": "other"})


def test_how_often_a_run_evaluates_and_saves_may_change_on_resuming(tmp_path):
    train(tiny(), samples(6), config(), tmp_path, NoTracker(), ABOUT)
    train(tiny(), samples(6), config(evaluate_every=1, save_every=1), tmp_path, NoTracker(), ABOUT)


def test_a_truncated_checkpoint_is_named(tmp_path):
    train(tiny(), samples(6), config(), tmp_path, NoTracker(), ABOUT)
    path = tmp_path / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptFile, match=r"checkpoint\.pt.*delete it"):
        train(tiny(), samples(6), config(), tmp_path, NoTracker(), ABOUT)


def test_a_holdout_that_leaves_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holdout=6"):
        train(tiny(), samples(6), config(holdout=6), tmp_path, NoTracker(), ABOUT)


def test_gradient_norms_are_clipped_for_each_adapter(tmp_path, monkeypatch):
    norms = []
    clip = nn.utils.clip_grad_norm_

    def spy(parameters, largest):
        norm = clip(parameters, largest)
        norms.append(largest)
        return norm

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", spy)
    train(tiny(), samples(4), config(exit_layers=[1, 2], clip=0.5), tmp_path, NoTracker(), ABOUT)
    assert set(norms) == {0.5} and len(norms) % 2 == 0
