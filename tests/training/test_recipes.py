"""Which training a model takes; what it takes is told from shapes, held to what it did take, and
refused if too much; each recipe and experiment trains on a tiny model."""

import inspect
import math
import re
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import psutil
import pytest
import torch
import training_cases
from commands import BRIEF, FILES, ROOT, SHORT, write_inputs
from composing import MODELS, of_command
from helpers import random_prompts, recipe_of, saved_adapter, tiny, tiny_target
from omegaconf import OmegaConf
from training_cases import curve, sample

from kangaroo.cli import commands as cli
from kangaroo.data import store
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.making import SynthesisConfig
from kangaroo.engine.clock import running
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.adapter_files import read_config
from kangaroo.models.loading import EMBEDDED, TINY, Dtype, ModelConfig, load, meta_model
from kangaroo.models.random_models import SHAPES
from kangaroo.models.target import TargetModel
from kangaroo.training import backend, batches, estimate
from kangaroo.training.batches import collate, forward_target
from kangaroo.training.estimate import Devices, Plan, Text, duration, forecast, writing_seconds
from kangaroo.training.loop import Trainer
from kangaroo.training.recipe import TrainerConfig, trainees
from kangaroo.utils.errors import ConfigError, KangarooError
from kangaroo.utils.ranks import Ranks

OWN = {"smollm2-135m", "tiny"}
GGUF = {"qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"}
PAPER = {"vicuna-7b": 2, "vicuna-13b": 3, "llama-2-13b-chat": 3}  # exit layers that it names
GB, A100 = 10**9, "NVIDIA A100-SXM4-80GB"
MODEL = ModelConfig(name="tiny", path=TINY, dtype=Dtype.float32, device="cpu")
RECIPES = [
    recipe_of(name="attention", exit_layers=[2, 3]),
    recipe_of(name="own_head", exit_layers=[2], own_head=True),
    recipe_of(name="mlp", exit_layers=[2], attention=False, feed_forward=True),
    recipe_of(name="fused", exit_layers=[2], feed_forward=True, fused=True, draft_steps=3),
]


def composed(*overrides):
    return OmegaConf.to_object(of_command("train", ["output=out", *overrides]))


@pytest.mark.parametrize("model", sorted(set(MODELS) - OWN - GGUF))
def test_a_large_model_has_the_papers_training_at_an_exit_layer_by_its_rule(model):
    config = composed(f"model={model}")
    trainer, layers = config.trainer, SHAPES[config.model.path]["num_hidden_layers"]
    (layer,) = config.adapter.named_exits(SimpleNamespace(n_layers=layers)).values()
    assert layers / 16 <= layer <= layers / 10
    assert layer == PAPER.get(model, layer)
    assert config.adapter.architecture == AdapterHeadConfig() and not config.more
    assert (trainer.epochs, trainer.learning_rate, trainer.warmup_steps) == (10, 5e-5, 2000)
    rows = trainer.batch_tokens // trainer.max_length
    assert (rows, trainer.accumulate, trainer.vocabulary) == (4, 8, None)
    assert "ShareGPT" in config.data.source and not config.data.regenerate
    assert config.data.path == f"outputs/data/sharegpt/{model}"


@pytest.mark.parametrize("model", sorted(OWN))
def test_a_small_model_keeps_the_defaults_of_the_options(model):
    config = composed(f"model={model}")
    assert replace(config.trainer, betas=tuple(config.trainer.betas)) == TrainerConfig()
    assert config.adapter == recipe_of()
    assert config.data.name == "self_synthesis"
    assert config.data.shards * config.data.shard_size == 1536
    assert config.data.path == f"outputs/data/self_synthesis/{model}"


@pytest.mark.parametrize("model", sorted(GGUF))
def test_a_model_in_a_gguf_file_learns_its_own_text_at_the_papers_exit_layer(model):
    config = composed(f"model={model}")
    layers = SHAPES[config.model.path]["num_hidden_layers"]
    exits = config.adapter.named_exits(SimpleNamespace(n_layers=layers))
    assert exits == {"attention-exit2": 2} and config.data.name == "self_synthesis"


def test_the_command_line_and_an_experiment_win_over_the_recipe():
    options = "model=vicuna-7b data=self_synthesis adapter=fused adapter.exit_layers=[3]"
    config = composed(*options.split(), "trainer=deepspeed", "trainer.learning_rate=1e-3")
    assert config.data.name == "self_synthesis"
    assert config.adapter.architecture.fused and config.adapter.exit_layers == [3]
    assert (config.trainer.zero_stage, config.trainer.learning_rate) == (1, 1e-3)
    assert config.trainer.epochs == 10  # the rest is the recipe's
    assert composed("model=vicuna-7b", "data.source=a.json").data.source == "a.json"
    config = composed("experiment=ours-7b")
    assert config.model.name == "vicuna-7b" and config.data.name == "self_synthesis"
    assert config.adapter.architecture.fused and config.adapter.exit_layers == [2, 3, 4]
    assert (config.trainer.learning_rate, config.trainer.epochs) == (1e-3, 3)
    assert composed("experiment=debug").adapter.exit_layers == [2]


def test_another_checkpoint_takes_the_recipe_of_the_model_that_is_named():
    mine = composed("model=vicuna-13b", "model.path=/my/folder", "model.name=mine")
    assert mine.data.path == "outputs/data/sharegpt/mine"
    for config in mine, composed("model=tiny", "recipe=vicuna-13b"):
        assert config.adapter.exit_layers is None and config.trainer.learning_rate == 5e-5


EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))
EXPERIMENTS.remove("methods")  # which evaluate.py takes: tests/project/test_commands.py
SETTINGS = ["model=tiny", "trainer.zero_stage=0", "trainer.shard_target=false", *BRIEF.split()]


@pytest.mark.parametrize("option", [f"experiment={x}" for x in EXPERIMENTS] + ["recipe=paper"])
def test_every_experiment_trains_a_few_steps_on_a_tiny_model(option, tmp_path):
    """One process in plain torch: `test_scale.py` holds that others end with the same weights."""
    write_inputs(tmp_path)
    source = f"data.source={tmp_path / 'ShareGPT.json'}"
    from_file = {"recipe=paper": [source], "experiment=questions": [source, *FILES.split()]}
    data = [f"data.path={tmp_path / 'data'}", *from_file.get(option, SHORT.split())]
    config = composed(*SETTINGS, option, *data)
    config.output = str(tmp_path / "out")
    recipes = [config.adapter, *config.more.values()]
    for recipe in recipes:  # tiny has six layers
        recipe.exit_layers = sorted({min(layer, 5) for layer in recipe.exit_layers or [2]})
    inspect.unwrap(cli.train)(config)
    *_, last = curve(tmp_path / "out")
    for recipe in recipes:
        for layer in recipe.exit_layers:
            folder = f"{recipe.name}-exit{layer}"
            assert math.isfinite(last[f"train/{folder}/loss"])
            assert read_config(tmp_path / "out" / folder).architecture == recipe.architecture


def test_memory_of_weights_moments_and_sums_is_that_of_the_backend():
    lm, config = TargetModel(load(MODEL)[0]), TrainerConfig(accumulate=2, vocabulary=100)
    expected = Plan(meta_model(MODEL), RECIPES, config, Text([50] * 200)).memory()
    trained = trainees(lm, RECIPES, torch.arange(100))
    real = backend.TorchBackend([t.adapter for t in trained], config, Ranks())
    parameters = real.parameters.values()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    adapters = sum(p.nbytes + p.grad.nbytes for p in parameters)
    real.collect()
    real.step([0.1] * len(trained))
    moments = [s[m] for s in real.optimizers[0].state.values() for m in backend.MOMENTS]
    assert expected["adapters"] == adapters + sum(x.nbytes for x in [*real.sums, *moments])
    head = 100 * lm.config.hidden_size * 4
    assert expected["target"] == sum(p.nbytes for p in lm.parameters()) + head


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_activations_are_about_what_autograd_keeps(recipe, dtype):
    lm, recipe = TargetModel(load(replace(MODEL, dtype=dtype))[0]), replace(recipe, exit_layers=[2])
    trained = trainees(lm, [recipe], None)
    adapter = trained[0].adapter
    tokens = collate([sample(ids, 16) for ids in random_prompts(400, 400)], 400, lm.device)
    outputs = forward_target(lm, tokens, trained)
    f_BTD = outputs.taps[2].float()
    deep_BTD = outputs.deep.get(adapter.deep_tap, f_BTD).float()
    weights = {p.untyped_storage().data_ptr() for p in adapter.parameters()}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no address comes twice
        return x

    half = torch.autocast("cpu", torch.bfloat16, enabled=dtype is not Dtype.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), half:
        adapter.states({2: f_BTD}, deep_BTD, outputs.meta, recipe.draft_steps)
    real = sum(storage.nbytes() for storage in kept.values())
    config, text = TrainerConfig(batch_tokens=800, holdout=2), Text([400] * 8, learnt=1 / 400)
    step, frozen = (Plan(lm, x, config, text).memory()["a micro-batch"] for x in ([recipe], []))
    count = len(outputs.taps) + len(outputs.deep)
    states = count * 800 * lm.config.hidden_size * lm.dtype.itemsize
    assert step - frozen - states == pytest.approx(real, rel=0.4)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with GPUs of these names and free bytes, or with so much memory alone."""
    monkeypatch.chdir(tmp_path)

    def with_gpus(*gpus, current=0, memory=None):
        names, free = zip(*gpus, strict=True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 80 * GB))
        monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
        monkeypatch.setattr(Plan, "seconds", lambda plan, device: {"the target": 3.0 * plan.steps})
        monkeypatch.setattr(estimate, "writing_seconds", lambda *of: 7200.0)
        if memory is not None:
            system = type("memory", (), {"available": memory})
            monkeypatch.setattr(psutil, "virtual_memory", lambda: system)

    return with_gpus


@cache
def shaped(*overrides):
    config = composed(*overrides)
    return meta_model(config.model), config


def foreseen(*overrides, processes=1):
    shapes, config = shaped(*overrides)
    recipes = [config.adapter, *config.more.values()]
    return forecast(shapes, recipes, config.model, config.data, config.trainer, processes)


def test_the_papers_training_fits_a_gpu_and_its_time_follows_from_the_speed(machine):
    machine((A100, 80 * GB))
    lines = foreseen("model=vicuna-7b")
    assert lines[0] == f"on 1 x {A100}, 80.0 GB free for each"
    assert "(of assumed lengths)" in lines[1]
    total = "12 hours: 2.0 hours for writing the data, 9.5 hours for the target"
    assert lines[2] == f"expect about {total}"
    assert [*map(duration, (119, 120, 3e5))] == ["119 seconds", "2.0 minutes", "3.5 days"]


@pytest.mark.parametrize(
    ("free", "line", "refused"),
    [
        (15, "model=vicuna-7b", r"training takes 1\d\.\d GB .*target 13\.5 GB.*15\.0 GB free"),
        (80, "model=vicuna-7b trainer.batch_tokens=262144", r"a micro-batch .*batch_tokens="),
        (60, "model=vicuna-33b model.device_map=null", r"target takes 65\.1 GB.*device_map=auto"),
        # 32 layers x 2 x 4096 x 2 bytes x 2048 tokens x 64 texts
        (80, "model=vicuna-7b data.regenerate=true", r"64 texts of .*values 68\.7 GB.*size=61, or"),
        (13.6, "model=vicuna-7b data.regenerate=true", "Ask for shorter texts"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers_and_the_fix(machine, free, line, refused):
    machine((A100, int(free * GB)))
    with pytest.raises(ConfigError, match=refused):
        foreseen(*line.split())


def test_each_process_counts_its_gpu_or_its_share_of_what_all_have(machine, monkeypatch):
    machine((A100, 60 * GB), (A100, 50 * GB), current=1, memory=30 * GB)
    assert f"2 x {A100}, 110.0 GB free" in foreseen("model=vicuna-33b")[0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"55\.0 GB free"):
        foreseen("model=vicuna-33b", processes=2)
    model = ModelConfig("m", "random:tiny")
    assert Devices.of(model).free == 50 * GB
    assert Devices.of(replace(model, device="cuda:0")).free == 60 * GB
    assert Devices.of(replace(model, device="cpu")) == Devices("CPU", 15 * GB)


def test_a_sharded_target_is_read_in_host_memory_and_trained_in_parts(machine, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    line = ["model=vicuna-33b", "trainer.shard_target=true"]
    machine((A100, 40 * GB), memory=600 * GB)
    assert "40.0 GB free" in foreseen(*line, processes=8)[0]
    machine((A100, 40 * GB), memory=400 * GB)
    with pytest.raises(ConfigError, match=r"target takes 65\.1 GB.* and CPU has 50\.0 GB"):
        foreseen(*line, processes=8)


@pytest.mark.parametrize("accumulate", [None, 3])
def test_the_steps_of_text_that_exists_are_those_of_its_training(accumulate, tmp_path):
    lengths = [5 + 7 * i % 90 for i in range(60)]
    sizes = {"holdout": 11, "batch_tokens": 130, "max_length": 70}
    settings = training_cases.config(accumulate=accumulate, **sizes)
    data = [sample(ids, 3) for ids in random_prompts(*lengths)]
    adapters = [training_cases.recipe()]
    trainer = Trainer(tiny(), data, adapters, settings, tmp_path, training_cases.ABOUT)
    plan = Plan(trainer.lm, adapters, settings, Text(lengths))
    assert plan.steps == trainer.total
    assert len(plan.held_out) == len(batches.plan(lengths[-11:], 130, 0, 0))


def test_text_of_other_settings_is_still_to_be_written(tmp_path):
    lm = tiny()
    data = SynthesisConfig(path=str(tmp_path), shards=1, shard_size=8)
    store.save(training_cases.samples(8), tmp_path, data.settings(lm), {})
    text = Text.of(data, lm)
    assert text.unwritten == 0 and text.source == f"as they lie in {tmp_path}"
    assert Text.of(replace(data, shards=3), lm).unwritten == 24


def test_text_that_lies_here_has_about_its_length():
    talk = [{"role": "user", "content": "x" * 80}, {"role": "assistant", "content": "y" * 120}]
    for vocab_size, regenerate, expected in (259, False, 200), (9**5, False, 50), (9**5, True, 30):
        data = ConversationsConfig(path="", regenerate=regenerate, max_answer_tokens=20)
        assert estimate._length([*talk, *talk], data, vocab_size) == 2 * (32 + expected)


def test_a_part_takes_what_its_work_takes_once_as_often_as_it_is_done(monkeypatch):
    def timed(work):
        work()
        return 2.0

    lm = meta_model(MODEL)
    monkeypatch.setattr(estimate, "_time", timed)
    text, options = Text([40] * 30, unwritten=20), {"epochs": 3, "batch_tokens": 80, "holdout": 10}
    config = training_cases.config(**options, evaluate_every=20)
    times = Plan(lm, RECIPES[-1:], config, text).seconds("cpu")
    # ten micro-batches of two texts; as many steps; five held-out ones after step 20 and 30
    assert times["the target"] == 10 * 3 * 2.0
    assert times["the adapters"] == 30 * 2.0
    assert times["held-out text"] == 5 * 2 * (2.0 + 2.0)
    data = composed("experiment=debug").data
    assert writing_seconds(lm, data, Text([40] * 30), "cpu", 1) == 0
    assert writing_seconds(lm, data, text, "cpu", 1) > 0


def test_settings_that_no_data_makes_right_are_refused_before_there_is_any(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "load_target", lambda model: pytest.fail("the model is loaded"))
    training_cases.run(tiny(), tmp_path, holdout=2, batch_tokens=256)
    lm = tiny_target()
    start = f"adapter.start={saved_adapter(lm, Adapter(lm, 1), tmp_path / 'start')}"
    command = ["experiment=debug", f"data.path={tmp_path / 'data'}"]
    for options, refused in (
        ([f"output={tmp_path}"], "was begun with other settings"),
        (["adapter.start=nowhere"], "nowhere"),
        ([start], "is for exit layer 1 .*; this one is for exit layer 2"),
        ([start, "adapter=eagle"], "with AdapterHeadConfig.*; this one .* with EagleHeadConfig"),
        (["+adapter@more.b=attention", "more.b.exit_layers=[2]"], "two adapters are called"),
    ):
        with pytest.raises(KangarooError, match=refused):
            inspect.unwrap(cli.train)(composed(*command, *options))
    assert not list(tmp_path.glob("data*"))


@pytest.mark.slow
def test_a_training_of_smollm2_takes_as_long_as_is_said(smollm2, tmp_path):
    """Measured before and after, since other work on a machine comes and goes."""
    lm, adapters = TargetModel(smollm2[0]), [recipe_of(exit_layers=[2])]
    data = [sample(ids, 60) for ids in random_prompts(*range(100, 220, 4))]
    settings = TrainerConfig(epochs=2, holdout=6, loss_chunk=256)
    config = ModelConfig("smollm2-135m", EMBEDDED, dtype=Dtype.float32, device="cpu")
    text = Text([len(x["input_ids"]) for x in data], learnt=100 / 160)
    plan = Plan(meta_model(config), adapters, settings, text)
    said = [sum(plan.seconds("cpu").values())]
    started = running()
    training_cases.train(lm, data, settings, tmp_path, recipes=adapters)
    took = running() - started
    said.append(sum(plan.seconds("cpu").values()))
    assert sum(said) / 2 == pytest.approx(took, rel=0.25)


def test_a_sweep_trains_no_exit_that_it_does_not_use():
    for file in (ROOT / "configs/sweep").glob("*.yaml"):
        text = file.read_text()
        exits = ",".join(re.findall(r"exit_layers=\[([\d,]+)\]", text))
        assert set(filter(None, exits.split(","))) == set(re.findall(r"-exit(\d)", text)), file
