"""Training: what a run reads, learns, saves, tells and refuses; it goes on where it was stopped."""

import json
import math
from dataclasses import replace
from itertools import takewhile

import pytest
import torch
import training_cases
from cases import Case, drafted_without_cache
from helpers import EXIT, adapter_for, random_prompts, tiny, vanilla_texts
from safetensors.torch import load_file
from training_cases import config, recipe, run, sample, samples, stored_samples, train

from kangaroo import ConfigError, CorruptFile, DataError, Diverged, Dtype, ModelConfig, Sampling
from kangaroo.cli.commands import check_format
from kangaroo.cpu.native import torch_multiplies
from kangaroo.heads.adapter_files import WEIGHTS, read_config
from kangaroo.heads.block import BlockHeadConfig
from kangaroo.heads.eagle3_head import Eagle3HeadConfig
from kangaroo.heads.eagle_head import EagleHeadConfig
from kangaroo.heads.medusa_heads import MedusaHeadsConfig
from kangaroo.training import backend, batches, results
from kangaroo.training.batches import collate, forward_target, grade
from kangaroo.training.distill import Loss
from kangaroo.training.loop import CHECKPOINT
from kangaroo.training.recipe import schedule, trainees
from kangaroo.training.results import METRICS, read_metrics
from kangaroo.utils.ranks import Ranks
from kangaroo.utils.tracking import NoTracker

EAGLE = {"architecture": EagleHeadConfig()}
EAGLE3 = {"architecture": Eagle3HeadConfig()}
PARTS = {  # what is asked for, and what of it is zero at first
    "feed_forward": (True, "feed_forward.down_proj.weight"),
    "fused": (True, "fuse.weight"),
    "attention_layers": (2, "further.0.attention.o_proj.weight"),
}
RUNS = {
    "stored": ({"use_stored_logits": True}, {}),
    "medusa": ({}, {"architecture": MedusaHeadsConfig(heads=2, own_head=False)}),
    "block": ({"muon": True, "vocabulary": 40}, {"architecture": BlockHeadConfig(places=3)}),
}
MEANS = ["loss", "agreement", "expected_acceptance"]
RATES = [f"ctar{w}" for w in range(1, 7)] + ["compression_rate"]


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
    planned = batches.plan(lengths, batch_tokens=8192, seed=0, epoch=0)
    assert sorted(i for batch in planned for i in batch) == list(range(len(lengths)))
    padded = [len(batch) * max(lengths[i] for i in batch) for batch in planned]
    assert sorted(padded)[-1] == 9000 and sorted(padded)[-2] <= 8192
    assert sum(lengths) > 0.985 * sum(padded)
    assert planned == batches.plan(lengths, 8192, seed=0, epoch=0)
    assert planned != batches.plan(lengths, 8192, seed=0, epoch=1)
    assert planned != batches.plan(lengths, 8192, seed=1, epoch=0)


def test_rows_are_aligned_on_a_gpu_alone():
    widths = [batches.row_width([9, 17], torch.device(kind)) for kind in ("cuda", "cpu")]
    assert widths == [24, 17] and batches.row_width([16], torch.device("cuda")) == 16


@pytest.mark.parametrize(
    "changes",
    [{}, {"own_head": True}, *(x | {"draft_steps": 3} for x in ({"fused": True}, EAGLE, EAGLE3))],
    ids=str,
)
def test_gradients_do_not_depend_on_how_a_step_is_split(changes):
    lm, data, gradients = tiny(), samples(4), []
    for parts in [data], [data[:1], data[1:]]:
        trained = trainees(lm, [recipe(**changes)], None)
        for part in parts:
            outputs = batches.forward_target(lm, batches.collate(part, 100, lm.device), trained)
            batches.train_step(lm, outputs, trained, 7, weight=0.01)
        gradients.append([parameter.grad for parameter in trained[0].adapter.parameters()])
    for whole, split in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, split, rtol=1e-4, atol=1e-6)  # float32, another order


def test_only_the_adapter_is_trained_and_it_learns(tmp_path):
    lm = tiny(deep_scale=1.0)
    before = {name: p.clone() for name, p in lm.hf.named_parameters()}
    (folder,) = train(lm, samples(5), config(epochs=12, holdout=1, learning_rate=1e-2), tmp_path)
    assert all(torch.equal(p, before[name]) for name, p in lm.hf.named_parameters())
    losses = [row[f"train/attention-exit{EXIT}/loss"] for row in read_metrics(tmp_path)]
    assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.2  # most of the rest is the teacher's own
    saved = json.loads((folder / "config.json").read_text())
    assert saved["facts"]["attention_window"] == 256
    assert saved["exit_layer"] == EXIT and saved["training"]["data"] == training_cases.ABOUT


def test_several_adapters_train_as_if_each_were_alone(tmp_path):
    layers = recipe(name="layer", feed_forward=True, exit_layers=[1])
    fused = recipe(name="fused", fused=True, draft_steps=2)
    together = [recipe(exit_layers=[0, 1, 2]), layers, fused]
    settings = config(vocabulary=40)
    folders = train(tiny(), samples(8), settings, tmp_path / "all", recipes=together)
    names = [f"attention-exit{layer}" for layer in (0, 1, 2)]
    assert [f.name for f in folders] == [*names, "layer-exit1", f"fused-exit{EXIT}"]
    apart = [*(recipe(exit_layers=[layer]) for layer in (0, 1, 2)), layers, fused]
    for folder, alone in zip(folders, apart, strict=True):
        (single,) = train(tiny(), samples(8), settings, tmp_path / folder.name, recipes=[alone])
        joint, separate = load_file(folder / WEIGHTS), load_file(single / WEIGHTS)
        assert all(torch.equal(joint[name], separate[name]) for name in separate)
        assert read_config(str(folder)).vocabulary == 40


def test_training_goes_on_from_an_adapter_and_may_add_parts_that_change_nothing_at_first(tmp_path):
    (folder,) = train(tiny(), samples(6), config(learning_rate=1e-2), tmp_path / "first")
    lm, saved = tiny(), load_file(folder / WEIGHTS)
    start = trainees(lm, [recipe(start=str(folder))], None)[0].adapter
    assert all(torch.equal(w, saved[n]) for n, w in start.state_dict().items())
    with pytest.raises(ConfigError, match=r"adapter\.start=.*exit layer 2"):
        trainees(lm, [recipe(start=str(folder), exit_layers=[1])], None)
    with pytest.raises(ConfigError, match="own_head=True"):
        trainees(lm, [recipe(start=str(folder), own_head=True)], None)
    for part, (value, zero) in PARTS.items():
        further = recipe(start=str(folder), **{part: value})
        grown = trainees(lm, [further], None)[0].adapter
        f_1TD, deep_1TD = torch.randn(2, 1, 5, lm.config.hidden_size)
        states = [a(f_1TD, deep_1TD, lm.chunk(0, 5, 0, 5), None) for a in (start, grown)]
        assert torch.equal(*states) and not torch.equal(states[0], f_1TD)
        (second,) = train(tiny(), samples(6), config(), tmp_path / part, recipes=[further])
        assert load_file(second / WEIGHTS)[zero].any()
        with pytest.raises(ConfigError, match=f"{part}={value}"):  # and none is taken away
            trainees(tiny(), [recipe(start=str(second))], None)


def test_a_random_start_is_the_seeds_and_not_the_targets():
    def started(seed, start="random"):
        (trained,) = trainees(tiny(), [recipe(start=start)], None, seed=seed)
        return trained.adapter.attention.q_proj.weight

    assert torch.equal(started(1), started(1))
    assert not torch.equal(started(1), started(2))
    assert not torch.equal(started(1), started(1, start=None))
    assert torch.equal(started(1, start=None), started(2, start=None))


@pytest.mark.parametrize("kind", RUNS)
def test_an_interrupted_run_ends_with_the_same_weights_and_metrics(kind, tmp_path, caplog):
    settings, parts = RUNS[kind]
    data = stored_samples(tiny(), count=16) if kind == "stored" else samples(12)

    def run(name, tracker):
        recipes = [recipe(**parts)]
        return train(tiny(), data, config(**settings), tmp_path / name, tracker, recipes=recipes)

    (whole,) = run("whole", NoTracker())
    total = len(training_cases.curve(tmp_path / "whole"))
    for step in (1, total // 2, total - 2):
        with pytest.raises(KeyboardInterrupt):
            run("stopped", training_cases.KillsAt(step))
    with (tmp_path / "stopped" / METRICS).open("a") as file:
        file.write(f'{{"step": {total - 1}, "torn')
    caplog.set_level("INFO")
    (stopped,) = run("stopped", NoTracker())
    assert f"going on after step {(total - 3) // 2 * 2} of {total}" in caplog.text
    assert (whole / WEIGHTS).read_bytes() == (stopped / WEIGHTS).read_bytes()
    assert training_cases.curve(tmp_path / "whole") == training_cases.curve(tmp_path / "stopped")


def test_what_changes_no_weight_may_change_on_resuming_and_all_else_is_refused_by_name(tmp_path):
    train(tiny(), samples(6), config(), tmp_path)
    train(tiny(), samples(6), config(evaluate_every=1, save_every=1), tmp_path)
    with pytest.raises(ConfigError, match=r"learning_rate=0\.005 there, 0\.1 now"):
        train(tiny(), samples(6), config(learning_rate=0.1), tmp_path)
    with pytest.raises(ConfigError, match="data='test' there, 'other' now"):
        train(tiny(), samples(6), config(), tmp_path, NoTracker(), {"fingerprint": "other"})
    path = tmp_path / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptFile, match=r"checkpoint\.pt.*Delete it"):
        train(tiny(), samples(6), config(), tmp_path)


def test_what_cannot_be_trained_is_refused_with_the_fix(tmp_path):
    refused = r"sample 1 has no trainable token among its first 5: .* 6 to 8\..*user: 'Why\?'"
    with pytest.raises(DataError, match=refused):
        batches.check_trainable([sample([*range(9)], n) for n in (3, 6)], max_length=5)
    with pytest.raises(ConfigError, match=r"holdout=20 .* of 20 .*Pass trainer\.holdout=2\."):
        train(tiny(), samples(20), config(holdout=20), tmp_path)
    with pytest.raises(ConfigError, match=f"two adapters are called attention-exit{EXIT}"):
        train(tiny(), samples(6), config(), tmp_path, recipes=[recipe(), recipe(loss=Loss.kl)])


@pytest.mark.parametrize("last", [False, True])
def test_a_training_that_diverges_stops_and_keeps_its_last_checkpoint(last, tmp_path, monkeypatch):
    update = backend.TorchBackend._update

    def diverging(self, rates):
        update(self, rates)
        if self.steps == (9 if last else 4):  # of 10
            next(iter(self.parameters.values())).data.fill_(torch.nan)

    monkeypatch.setattr(backend.TorchBackend, "_update", diverging)
    wrong = "a weight is not finite at step 10" if last else "loss is not finite at step 6"
    message = f"{wrong} of 10: .* keeps the last .*lower .* another output="
    with pytest.raises(Diverged, match=message):
        train(tiny(), samples(12), config(), tmp_path)
    kept = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert kept["progress"]["step"] == (8 if last else 4)
    assert all(weight.isfinite().all() for weight in kept["backend"]["weights"].values())
    assert not list(tmp_path.glob(f"*/{WEIGHTS}"))


def test_muon_moves_linear_layers_but_for_heads_and_adamw_all_else():
    adapter = trainees(tiny(), [recipe(own_head=True)], None)[0].adapter
    options = replace(config(muon=True, clip=1e9), accumulate=1)
    moved = {id(p) for p in backend.muon_weights(adapter)}
    before = {name: p.detach().clone() for name, p in adapter.named_parameters()}
    names = {name for name, p in adapter.named_parameters() if id(p) in moved}
    assert names == {f"attention.{part}_proj.weight" for part in "qkvo"}
    optimizer = backend.TorchBackend([adapter], options, Ranks())
    for parameter in adapter.parameters():
        parameter.grad = torch.randn_like(parameter)
        if id(parameter) in moved:
            u, lengths, vh = torch.linalg.svd(parameter.grad, full_matrices=False)
            parameter.grad = u * torch.linspace(0.1, 1, len(lengths)) @ vh
    optimizer.step([1e-2])
    for name, p in adapter.named_parameters():
        if id(p) in moved:  # as long a step as AdamW's: 0.2 x the learning rate for a number
            lengths = torch.linalg.svdvals((p.detach() - before[name]) / 1e-2)
            expected = 0.2 * max(p.shape) ** 0.5
            assert (lengths / expected - 1).abs().max() < 0.5  # five Newton-Schulz steps, bfloat16
        else:
            step = (p.detach() - before[name]).abs() / 1e-2
            torch.testing.assert_close(step, torch.ones_like(step), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", Dtype)
def test_a_format_that_this_processor_is_slow_in_is_named(dtype, caplog):
    check_format(ModelConfig(name="tiny", path="tiny", device="cpu", dtype=dtype))
    assert ("model.dtype=float32" in caplog.text) == (not torch_multiplies(dtype.torch))


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


def test_every_metric_is_named_after_when_and_of_whom_it_was_taken(tmp_path):
    folder = run(tiny(), tmp_path, recipe(name="fused", fused=True, draft_steps=2))
    *_, last = read_metrics(tmp_path)
    name, steps = folder.name, [f"step{k}/{mean}" for k in range(2, 7) for mean in MEANS]
    assert set(last) == {
        *("step", "tokens", "tokens_per_second", "peak_memory_gib"),
        *(f"train/{name}/{figure}" for figure in [*MEANS, *steps[:3], "learning_rate"]),
        *(f"held_out/{name}/{figure}" for figure in MEANS + steps + RATES),
    }
    assert 0.05 < last["peak_memory_gib"] < 100
    progress = read_config(str(folder)).training["progress"]
    assert set(progress["held_out"]) == {*MEANS, *steps, *RATES}
    assert progress["tokens"] == last["tokens"]


def test_answers_too_short_for_a_draft_step_leave_its_metrics_out(tmp_path):
    data = [sample(ids, len(ids) - 1) for ids in random_prompts(*range(5, 13))]
    folder = run(tiny(), tmp_path, recipe(fused=True, draft_steps=2), data)
    *_, last = read_metrics(tmp_path)
    assert f"train/{folder.name}/loss" in last and f"train/{folder.name}/step2/loss" not in last
