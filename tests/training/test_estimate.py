"""What a training takes is told from shapes, held to what it did take, and refused if too much."""

import json
import shutil
from collections import namedtuple
from dataclasses import is_dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from helpers import random_prompts, recipe_of
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from training_cases import sample, train

from kangaroo import cli
from kangaroo.data import store
from kangaroo.engine import topk_logits
from kangaroo.heads import adapter_files
from kangaroo.models.loading import TINY, Dtype, ModelConfig, load, meta_model
from kangaroo.models.target import TargetModel
from kangaroo.training import backend
from kangaroo.training.batches import collate
from kangaroo.training.checkpoint import CHECKPOINT
from kangaroo.training.config import TrainerConfig
from kangaroo.training.distill import StoredDistributions
from kangaroo.training.estimate import Devices, Text, estimate, foresee
from kangaroo.training.micro_batch import forward_target
from kangaroo.training.recipe import trainees
from kangaroo.utils.errors import ConfigError, DataError
from kangaroo.utils.ranks import Ranks

GB, A100 = 10**9, "NVIDIA A100-SXM4-80GB"
MODEL = ModelConfig(name="tiny", path=TINY, dtype=Dtype.float32, device="cpu")
RECIPES = [
    recipe_of(name="attention", exit_layers=[2, 3]),
    recipe_of(name="own_head", exit_layers=[2], own_head=True),
    recipe_of(name="mlp", exit_layers=[2], attention=False, feed_forward=True),
    recipe_of(name="fused", exit_layers=[2], feed_forward=True, fused=True, draft_steps=3),
]
TEXT = Text(200, 10_000, 8_000, 50)


def texts(number, length, likeliest=0):
    """Samples of random tokens, with records of their distributions."""
    data = [sample(ids, 16) for ids in random_prompts(*[length] * number)]
    for one in data if likeliest else ():
        tokens = np.arange(likeliest)[None].repeat(length - 16, 0)
        one["teacher"] = topk_logits.records(tokens, np.full(tokens.shape, 0.2), 64)
    return data


def test_memory_of_weights_moments_and_sums_is_that_of_the_backend():
    lm, config = TargetModel(load(MODEL)[0]), TrainerConfig(accumulate=2, vocabulary=100)
    expected = estimate(meta_model(MODEL), RECIPES, config, TEXT).memory
    made = trainees(lm, RECIPES, torch.arange(100))
    real = backend.TorchBackend([t.adapter for t in made], config, Ranks())
    parameters = real.parameters.values()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    adapters = sum(p.nbytes + p.grad.nbytes for p in parameters)
    real.collect()
    real.step([0.1] * len(made))
    moments = [s[m] for s in real.optimizers[0].state.values() for m in backend.MOMENTS]
    assert expected["adapters"] == adapters + sum(x.nbytes for x in [*real.sums, *moments])
    head = 100 * lm.config.hidden_size * 4
    assert expected["target"] == sum(p.nbytes for p in lm.parameters()) + head


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_activations_are_about_what_autograd_keeps(recipe, dtype):
    lm, recipe = TargetModel(load(replace(MODEL, dtype=dtype))[0]), replace(recipe, exit_layers=[2])
    made = trainees(lm, [recipe], None)
    adapter = made[0].adapter
    seen = forward_target(lm, collate(texts(2, 400), 400, lm.device), made, 32)
    f_BTD = seen.taps[2].float()
    deep_BTD = seen.deep.get(adapter.deep_tap, f_BTD).float()
    weights = {p.untyped_storage().data_ptr() for p in adapter.parameters()}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no address comes twice
        return x

    half = torch.autocast("cpu", torch.bfloat16, enabled=dtype is not Dtype.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), half:
        adapter.states({2: f_BTD}, deep_BTD, seen.meta, recipe.draft_steps)
    real = sum(storage.nbytes() for storage in kept.values())
    config, text = TrainerConfig(batch_tokens=800), Text(8, 3200, 8, 400)
    step, frozen = (
        estimate(lm, recipes, config, text).memory["a micro-batch"] for recipes in ([recipe], [])
    )
    states = (len(seen.taps) + len(seen.deep)) * 800 * lm.config.hidden_size * lm.dtype.itemsize
    assert step - frozen - states == pytest.approx(real, rel=0.4)


def test_checkpoints_and_adapters_have_the_expected_size_and_a_full_disk_is_refused(
    tmp_path, monkeypatch
):
    lm, data = TargetModel(load(MODEL)[0]), texts(64, 200)
    rarely = {"evaluate_every": 100, "save_every": 100, "decode_prompts": 0}
    config = TrainerConfig(epochs=1, holdout=8, **rarely)
    expected = estimate(lm, RECIPES, config, Text(64, 64 * 200, 64 * 184, 200))
    folders = train(lm, data, config, tmp_path, recipes=RECIPES)
    names = (adapter_files.WEIGHTS, adapter_files.VOCABULARY)
    saved = sum((folder / name).stat().st_size for folder in folders for name in names)
    saved += 2 * (tmp_path / CHECKPOINT).stat().st_size
    assert saved == pytest.approx(expected.disk, rel=0.05)
    usage = namedtuple("usage", "total used free")(10, 9, 1)
    expected.check_disk(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="output="):
        expected.check_disk(tmp_path)


def test_kept_distributions_save_the_deep_layers_and_the_head():
    lm, config = meta_model(MODEL), TrainerConfig(epochs=2, holdout=8)
    text = Text(64, 64 * 200, 64 * 184, 200, likeliest=4)
    whole = replace(text, likeliest=0)
    for recipes, depth in ([RECIPES[0]], 3), ([RECIPES[0], RECIPES[3]], lm.n_layers - 1):
        kept, full = estimate(lm, recipes, config, text), estimate(lm, recipes, config, whole)
        parameters = sum(p.numel() for p in lm.layers.parameters())
        forward = 2 * 2.0 * parameters * int(56 / 64 * text.tokens)
        head = 2 * 2.0 * lm.config.vocab_size * lm.config.hidden_size * 56 * 184
        saved = forward * (1 - depth / lm.n_layers) + head
        assert full.flops - kept.flops == pytest.approx(saved)
        assert sum(kept.memory.values()) < sum(full.memory.values())
        assert estimate(lm, recipes, replace(config, use_stored_logits=False), text) == full


def held_by(*things) -> int:
    """Bytes of all memory that tensors in these keep, a view's whole."""
    storages, left = {}, list(things)
    while left:
        thing = left.pop()
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict):
            left += thing.values()
        elif isinstance(thing, list | tuple):
            left += thing
        elif is_dataclass(thing) or isinstance(thing, StoredDistributions):
            left.append(vars(thing))
    return sum(storages.values())


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_remembered_of_kept_distributions_is_what_is_held(fused, machine):
    lm, data = TargetModel(load(MODEL)[0]), texts(16, 200, likeliest=4)
    recipe = recipe_of(exit_layers=[2], fused=fused)
    config = TrainerConfig(epochs=2, holdout=1, cache_target_states=True, batch_tokens=200)
    made = trainees(lm, [recipe], None)
    seen = forward_target(lm, collate(data, 200, lm.device, stored=True), made, 256)
    text = Text(17, 17 * 200, 17 * 184, 200, likeliest=4)
    told = estimate(lm, [recipe], config, text).memory["remembered states"]
    assert told == pytest.approx(held_by(vars(seen)), rel=0.05)
    # they count once the text is known
    machine((A100, 80 * GB))
    devices, expected, _ = foreseen("model=vicuna-7b", "trainer.cache_target_states=true")
    with pytest.raises(ConfigError, match=r"trainer\.cache_target_states=false"):
        devices.check("training", expected.memory)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with GPUs of these names and free bytes, or with so much memory alone."""
    monkeypatch.chdir(tmp_path)

    def with_gpus(*gpus, current=0, memory=None):
        def of(device=None):
            index = current if device is None else device
            assert index in range(len(gpus)), f"there is no GPU {index}"
            return gpus[index]

        answers = {
            "is_available": lambda: bool(gpus),
            "device_count": lambda: len(gpus),
            "current_device": lambda: current,
            "mem_get_info": lambda device: (of(device)[1], 80 * GB),
            "get_device_name": lambda device=None: of(device)[0],
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        if memory is not None:
            system = type("memory", (), {"available": memory})
            monkeypatch.setattr(psutil, "virtual_memory", lambda: system)

    return with_gpus


def foreseen(*overrides, processes=1):
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        config = OmegaConf.to_object(compose("train", ["output=out", *overrides]))
    recipes = [config.adapter, *config.more.values()]
    shapes = meta_model(config.model)
    return foresee(shapes, recipes, config.model, config.data, config.trainer, processes)


def test_the_papers_training_fits_a_gpu_and_its_time_follows_from_the_peak(machine):
    machine((A100, 80 * GB))
    devices, expected, lines = foreseen("model=vicuna-7b")
    assert devices == Devices(A100, 80 * GB, 80 * GB, "cuda:0")
    assert expected.memory["adapters"] == (8 + 8 + 8) * (4 * 4096**2 + 2 * 4096)
    assert lines[0] == f"on 1 x {A100}, 80.0 GB free for each" and "(assumed)" in lines[1]
    hours = expected.flops / (0.4 * 312e12) / 3600
    assert f"about {hours:.2g} hours of training, {hours / 10:.2g} an epoch" in lines[2]
    assert "312 TFLOP/s (by its data sheet)" in lines[2]
    assert len(lines) == 3  # ShareGPT's answers are not written anew
    _, _, lines = foreseen("model=vicuna-7b", processes=8)
    assert f"about {hours / 8:.2g} hours" in lines[2]
    *_, lines = foreseen("model=vicuna-7b", "data.regenerate=true", "data.batch_size=61")
    assert "61 texts at a time" in lines[3]


def test_a_local_file_is_read_before_anything_is_said_of_it(machine, tmp_path):
    machine((A100, 80 * GB))
    file = tmp_path / "talks.json"
    talk = [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 400}]
    file.write_text(json.dumps([{"conversations": talk}] * 60))
    line = "model=smollm2-135m", "data=conversations", f"data.source={file}", "trainer.holdout=6"
    *_, lines = foreseen(*line, "data.limit=20", "data.max_length=32")
    assert f"for 20 conversations, 640 tokens (as many as in {file}, of an assumed" in lines[1]
    with pytest.raises(ConfigError, match=r"holdout=60 .* of 60 .*Pass trainer\.holdout=6\."):
        foreseen(*line, "trainer.holdout=60")
    file.write_text("[]")
    with pytest.raises(DataError, match="holds no conversations"):
        foreseen(*line)
    file.unlink()
    with pytest.raises(DataError, match=f"there is no '{file}'"):
        foreseen(*line)


@pytest.mark.parametrize(
    ("free", "line", "refused"),
    [
        (15, "model=vicuna-7b", r"training takes 1\d\.\d GB .*target 13\.5 GB.*15\.0 GB free"),
        (80, "model=vicuna-7b trainer.batch_tokens=262144", r"a micro-batch .*batch_tokens="),
        (60, "model=vicuna-33b model.device_map=null", r"target takes 65\.1 GB.*device_map=auto"),
        # 32 layers x 2 x 4096 x 2 bytes x 2048 tokens x 64 texts
        (80, "model=vicuna-7b data.regenerate=true", r"64 texts of .*values 68\.7 GB.*size=61, or"),
        (80, "model=vicuna-7b data.regenerate=true data.batch_size=62", r"batch_size=61, or"),
        (13.6, "model=vicuna-7b data.regenerate=true", "Ask for shorter texts"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers_and_the_fix(machine, free, line, refused):
    machine((A100, int(free * GB)))
    with pytest.raises(ConfigError, match=refused):
        foreseen(*line.split())


def test_each_process_counts_its_gpu_or_its_share_of_what_all_have(machine, monkeypatch):
    machine((A100, 60 * GB), (A100, 50 * GB), current=1, memory=30 * GB)
    devices, _, lines = foreseen("model=vicuna-33b")
    assert devices.free == 110 * GB and f"2 x {A100}" in lines[0]
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
    devices, expected, _ = foreseen(*line, processes=8)
    assert devices.free == 40 * GB and expected.memory["target"] < 10 * GB
    machine((A100, 40 * GB), memory=400 * GB)
    with pytest.raises(ConfigError, match=r"target takes 65\.1 GB.* and CPU has 50\.0 GB"):
        foreseen(*line, processes=8)


def test_a_cpu_and_an_unknown_gpu_are_measured(machine, monkeypatch):
    machine(memory=8 * GB)
    devices, _, lines = foreseen("model=smollm2-135m")
    assert devices.free == 8 * GB and "(measured)" in lines[2] and "64 texts at a" in lines[3]
    for dtype in torch.float32, torch.bfloat16:
        assert 1e8 < devices.speed(dtype)[0] < 1e14
    machine(("NVIDIA X9", 80 * GB), ("NVIDIA X9", 80 * GB), current=1)
    places = {"cuda:1": (1e14, "measured")}
    monkeypatch.setattr(Devices, "speed", lambda devices, dtype: places[devices.place])
    _, expected, lines = foreseen("model=vicuna-7b")
    hours = expected.flops / (0.4 * 1e14) / 3600
    assert f"about {hours:.2g} hours" in lines[2] and "100 TFLOP/s (measured)" in lines[2]


def test_data_that_are_there_are_counted_and_not_written_again(machine):
    machine((A100, 10 * GB))
    sample = {"messages": [], "input_ids": [1] * 50, "loss_mask": [0] * 20 + [1] * 30}
    with pytest.raises(DataError, match="no complete dataset"):
        foreseen("model=tiny", "data=mix")
    paths = [Path("outputs/data", kind, "tiny") for kind in ("self_synthesis", "tasks")]
    for path in paths:
        store.save([sample] * 300, path, {}, {})
    for line in ([], ["data=mix"]):
        *_, lines = foreseen("model=tiny", *line)
        assert len(lines) == 3 and f"as they lie in {paths[0]}" in lines[1]
    assert "600 conversations, 30000 tokens" in lines[1]
