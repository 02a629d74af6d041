"""Which training a model takes; what it takes is told from shapes, held to what it did take, and
refused if too much; each recipe and experiment trains on a tiny model."""

import inspect
import math
from dataclasses import replace
from functools import cache

import psutil
import pytest
import torch
import training_cases
from commands import BRIEF, FILES, ROOT, SHORT, write_inputs
from composing import MODELS, of_command
from helpers import random_prompts, recipe_of
from omegaconf import OmegaConf
from training_cases import curve, sample

from kangaroo.cli import commands as cli
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.adapter_files import read_config
from kangaroo.models.loading import TINY, Dtype, ModelConfig, load, meta_model
from kangaroo.models.random_models import SHAPES
from kangaroo.models.target import TargetModel
from kangaroo.training import backend
from kangaroo.training.batches import collate, forward_target
from kangaroo.training.estimate import Devices, Text, estimate, forecast
from kangaroo.training.recipe import TrainerConfig, trainees
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranks import Ranks

nothing_is_drawn = pytest.fixture(training_cases.nothing_is_drawn)
OWN = {"smollm2-135m", "tiny"}
PAPER = {"vicuna-7b": 2, "vicuna-13b": 3, "llama-2-13b-chat": 3}  # exit layers that it names


def composed(*overrides):
    return OmegaConf.to_object(of_command("train", ["output=out", *overrides]))


@pytest.mark.parametrize("model", sorted(set(MODELS) - OWN))
def test_a_large_model_has_the_papers_training_at_an_exit_layer_by_its_rule(model):
    config = composed(f"model={model}")
    trainer, layers = config.trainer, SHAPES[config.model.path]["num_hidden_layers"]
    (layer,) = config.adapter.exit_layers
    assert layers / 16 <= layer <= layers / 10
    assert layer == PAPER.get(model, layer)
    assert config.adapter.architecture == AdapterHeadConfig() and not config.more
    assert (trainer.epochs, trainer.learning_rate, trainer.warmup_steps) == (10, 5e-5, 2000)
    assert list(trainer.betas) == [0.9, 0.95] and trainer.weight_decay == 0.01
    rows = trainer.batch_tokens // trainer.max_length
    assert (rows, trainer.accumulate, trainer.max_length) == (4, 8, 2048)
    assert (trainer.vocabulary, trainer.zero_stage, trainer.shard_target) == (None, 0, False)
    data = config.data
    assert data.name == "conversations" and not data.regenerate
    assert data.source.startswith("hf://datasets/") and "ShareGPT" in data.source
    assert data.path == f"outputs/data/sharegpt/{model}"


@pytest.mark.parametrize("model", sorted(OWN))
def test_a_small_model_keeps_the_defaults_of_the_options(model):
    config = composed(f"model={model}")
    assert replace(config.trainer, betas=tuple(config.trainer.betas)) == TrainerConfig()
    assert config.adapter == recipe_of()
    assert config.data.name == "self_synthesis"
    assert config.data.shards * config.data.shard_size == 1536
    assert config.data.path == f"outputs/data/self_synthesis/{model}"


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
        assert config.adapter.exit_layers == [3] and config.trainer.learning_rate == 5e-5


EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))
EXPERIMENTS.remove("methods")  # which evaluate.py takes: tests/project/test_commands.py
SETTINGS = ["model=tiny", "trainer.zero_stage=0", "trainer.shard_target=false", *BRIEF.split()]


@pytest.mark.usefixtures("nothing_is_drawn")
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
        recipe.exit_layers = sorted({min(layer, 5) for layer in recipe.exit_layers})
    inspect.unwrap(cli.train)(config)
    *_, last = curve(tmp_path / "out")
    for recipe in recipes:
        for layer in recipe.exit_layers:
            folder = f"{recipe.name}-exit{layer}"
            assert math.isfinite(last[f"train/{folder}/loss"])
            assert read_config(tmp_path / "out" / folder).architecture == recipe.architecture


GB, A100 = 10**9, "NVIDIA A100-SXM4-80GB"
MODEL = ModelConfig(name="tiny", path=TINY, dtype=Dtype.float32, device="cpu")
RECIPES = [
    recipe_of(name="attention", exit_layers=[2, 3]),
    recipe_of(name="own_head", exit_layers=[2], own_head=True),
    recipe_of(name="mlp", exit_layers=[2], attention=False, feed_forward=True),
    recipe_of(name="fused", exit_layers=[2], feed_forward=True, fused=True, draft_steps=3),
]


def test_memory_of_weights_moments_and_sums_is_that_of_the_backend():
    lm, config = TargetModel(load(MODEL)[0]), TrainerConfig(accumulate=2, vocabulary=100)
    _, expected, _ = estimate(meta_model(MODEL), RECIPES, config, Text(200, 10_000, 8_000, 50))
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
    config, text = TrainerConfig(batch_tokens=800), Text(8, 3200, 8, 400)
    step, frozen = (estimate(lm, x, config, text)[1]["a micro-batch"] for x in ([recipe], []))
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
        monkeypatch.setattr(Devices, "speed", lambda devices, dtype: 1e14)
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
    assert lines[0] == f"on 1 x {A100}, 80.0 GB free for each" and "(assumed)" in lines[1]
    assert "of 100 TFLOP/s (measured)" in lines[2]
    alone, eight = (float(foreseen("model=vicuna-7b", processes=n)[2].split()[2]) for n in (1, 8))
    assert 20 < alone < 500 and eight == pytest.approx(alone / 8, rel=0.05)


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


def test_the_speed_of_a_cpu_is_measured():
    for dtype in torch.float32, torch.bfloat16:
        assert 1e8 < Devices("CPU", 8 * GB).speed(dtype) < 1e14
