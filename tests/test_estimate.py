"""What a training takes: told from shapes alone, and held to what it did take."""

import shutil
from collections import namedtuple
from dataclasses import is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import random_prompts, recipe_of
from transformers import T5Config

from kangaroo.data import store
from kangaroo.engine import topk_logits as teacher
from kangaroo.estimate.devices import matmul_speed
from kangaroo.estimate.estimate_report import append
from kangaroo.estimate.expectation import Planned, Text, check_disk, expect
from kangaroo.heads import adapter_files
from kangaroo.models.loading import EMBEDDED, TINY, Dtype, ModelConfig, load
from kangaroo.models.meta_model import blueprint
from kangaroo.models.target import LM
from kangaroo.training import backend
from kangaroo.training.batches import collate
from kangaroo.training.checkpoint import CHECKPOINT
from kangaroo.training.config import TrainerConfig
from kangaroo.training.distill import StoredDistributions
from kangaroo.training.loop import Trainer
from kangaroo.training.micro_batch import forward_target
from kangaroo.training.recipe import trainees
from kangaroo.utils.errors import ConfigError, ModelNotFound, UnsupportedModel
from kangaroo.utils.tracking import NoTracker

ROOT = Path(__file__).parents[1]
MODEL = ModelConfig(name="tiny", path=TINY, dtype=Dtype.float32, device="cpu")
RECIPES = [
    recipe_of(name="attention", exit_layers=[2, 3]),
    recipe_of(name="own_head", exit_layers=[2], own_head=True),
    recipe_of(name="mlp", exit_layers=[2], attention=False, feed_forward=True),
    recipe_of(name="fused", exit_layers=[2], feed_forward=True, fused=True, draft_steps=3),
]
# of the hub's safetensors files, in parameters
PUBLISHED = {
    "lmsys/vicuna-7b-v1.3": 6_738_415_616,
    "lmsys/vicuna-13b-v1.3": 13_015_864_320,
    "lmsys/vicuna-33b-v1.3": 32_528_943_616,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
}


def count(module):
    return sum(p.numel() for p in module.parameters())


def samples(number, length):
    return [
        {
            "messages": [
                {"role": "user", "content": "Why?" * 4},
                {"role": "assistant", "content": "x" * (length - 16)},
            ],
            "input_ids": ids,
            "loss_mask": [0] * 16 + [1] * (length - 16),
        }
        for ids in random_prompts(*[length] * number)
    ]


@pytest.mark.parametrize("path", PUBLISHED)
def test_known_shapes_have_the_published_number_of_parameters(path):
    assert count(blueprint(ModelConfig(name="known", path=path))) == PUBLISHED[path]


def test_the_papers_adapter_has_the_papers_size():
    lm = blueprint(ModelConfig(name="vicuna-7b", path="lmsys/vicuna-7b-v1.3"))
    expected = expect(
        lm,
        [recipe_of(name="a", exit_layers=[2])],
        TrainerConfig(),
        Text(200, 10_000, 8_000, 50),
    )
    assert expected.trained == {"a-exit2": 4 * 4096**2 + 2 * 4096}


def test_parameters_are_those_of_the_real_modules():
    lm = LM(load(MODEL)[0])
    config = TrainerConfig(vocabulary=100)
    expected = expect(blueprint(MODEL), RECIPES, config, Text(200, 10_000, 8_000, 50))
    made = trainees(lm, RECIPES, torch.arange(100))
    assert expected.target == count(lm)
    assert expected.trained == {t.name: count(t.adapter) for t in made}


def test_smollm2_is_the_model_in_the_table(smollm2):
    """Also for an adapter: one that is made from the table alone fits the real target."""
    shape, known = smollm2[0].config.to_dict(), blueprint(ModelConfig("smollm2", EMBEDDED))
    fields = known.config.to_dict()
    assert all(fields[name] == shape[name] for name in ("vocab_size", "max_position_embeddings"))
    shipped = adapter_files.read_config(str(ROOT / "adapters/smollm2-135m"))
    assert adapter_files.target_hash(known) == shipped.target_hash


def test_memory_of_weights_moments_and_sums_is_that_of_the_backend():
    lm = LM(load(MODEL)[0])
    config = TrainerConfig(accumulate=2)
    expected = expect(lm, RECIPES, config, Text(200, 10_000, 8_000, 50)).memory
    made = trainees(lm, RECIPES, None)
    real = backend.begin([t.adapter for t in made], config)
    for parameter in real.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    gradients = sum(p.nbytes + p.grad.nbytes for p in real.parameters.values())
    real.collect()
    real.step([0.1] * len(made))
    (optimizer,) = real.optimizers
    states = optimizer.state.values()
    assert expected["target"] == sum(p.nbytes for p in lm.parameters())
    assert expected["weights and gradients"] == gradients
    assert expected["exact sum"] == sum(total.nbytes for total in real.sums)
    assert expected["optimizer"] == sum(s[m].nbytes for s in states for m in backend.MOMENTS)


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_activations_are_what_autograd_keeps(recipe, dtype):
    lm = LM(load(replace(MODEL, dtype=dtype))[0])
    made = trainees(lm, [replace(recipe, exit_layers=[2])], None)
    adapter = made[0].adapter
    seen = forward_target(lm, collate(samples(2, 40), 100, lm.device), made, 32)
    f_BTD = seen.taps[2].float()
    deep_BTD = seen.deep.get(adapter.deep_tap, f_BTD).float()
    own = {p.untyped_storage().data_ptr() for p in adapter.parameters()}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no address comes twice
        return x

    half = dtype is not Dtype.float32
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        adapter.states({2: f_BTD}, deep_BTD, seen.block, recipe.draft_steps)
    real = sum(storage.nbytes() for storage in kept.values())
    expected = Planned(lm, recipe, "it", 2, None).saved(lm, rows=2, width=40)
    # the cosines of RoPE are in the target's format, a few hundred bytes
    assert expected == pytest.approx(real, rel=0.02)


def test_files_have_the_expected_size(tmp_path):
    lm, data = LM(load(MODEL)[0]), samples(64, 200)
    store.save(data, tmp_path / "data", {}, {})
    config = TrainerConfig(
        epochs=1, holdout=8, evaluate_every=100, save_every=100, decode_prompts=0
    )
    text = replace(Text.of(data, 2048), characters=1.0)
    expected = expect(lm, RECIPES, config, text).disk
    arrow = sum(file.stat().st_size for file in (tmp_path / "data").glob("*.arrow"))
    assert arrow == pytest.approx(expected["dataset"], rel=0.05)
    trainer = Trainer(lm, data, RECIPES, config, tmp_path, {"fingerprint": "test"})
    folders = trainer.train(NoTracker())
    checkpoint = (tmp_path / CHECKPOINT).stat().st_size
    assert 2 * checkpoint == pytest.approx(expected["checkpoint, while it is replaced"], rel=0.05)
    names = (adapter_files.WEIGHTS, adapter_files.VOCABULARY)
    saved = sum((folder / name).stat().st_size for folder in folders for name in names)
    assert saved == pytest.approx(expected["adapters"], rel=0.1)  # tiny files, with headers


def kept_samples(number, length, likeliest=4):
    """The same with records of their distributions."""
    data = samples(number, length)
    for one in data:
        count = sum(one["loss_mask"])
        tokens = np.arange(likeliest)[None].repeat(count, 0)
        chances = np.full((count, likeliest), 0.2)
        one["teacher"] = teacher.records(tokens, chances, 64)
    return data


def test_kept_distributions_save_the_deep_layers_and_the_head_and_take_disk(tmp_path):
    lm, data = LM(load(MODEL)[0]), kept_samples(64, 200)
    text, config = Text.of(data, 2048), TrainerConfig(epochs=2, holdout=8, cache_target_states=True)
    assert text.teacher == 4
    whole = replace(text, teacher=0)
    shallow, fused = [RECIPES[0]], [RECIPES[0], RECIPES[3]]
    kept, full = expect(lm, shallow, config, text), expect(lm, shallow, config, whole)
    assert kept.flops["teacher's head"] == 0 < full.flops["teacher's head"]
    part = kept.flops["frozen forward"] / full.flops["frozen forward"]
    assert part == pytest.approx(3 / lm.n_layers)  # the deeper of its exits
    assert sum(kept.memory.values()) < sum(full.memory.values())
    # an adapter that reads what goes into the last layer needs those below it
    deep, whole_deep = expect(lm, fused, config, text), expect(lm, fused, config, whole)
    part = deep.flops["frozen forward"] / whole_deep.flops["frozen forward"]
    assert part == pytest.approx((lm.n_layers - 1) / lm.n_layers)
    assert deep.flops["teacher's head"] == 0 < whole_deep.flops["teacher's head"]
    told = expect(lm, shallow, replace(config, use_stored_logits=False), text)
    assert (told.flops, told.memory) == (full.flops, full.memory)
    store.save(data, tmp_path / "data", {}, {"teacher": {"model": lm.name, "likeliest": 4}})
    sizes = {file.suffix: file.stat().st_size for file in (tmp_path / "data").iterdir()}
    records = kept.disk["dataset"] - full.disk["dataset"]
    assert records == kept.disk["shards"] - full.disk["shards"]
    assert sizes[".npy"] == pytest.approx(records, rel=0.01)


def held_by(*things) -> int:
    """Bytes of all memory that tensors in these keep, a view's whole."""
    tensors, found = [], list(things)
    while found:
        thing = found.pop()
        if isinstance(thing, torch.Tensor):
            tensors.append(thing)
        elif isinstance(thing, dict):
            found += thing.values()
        elif isinstance(thing, list | tuple):
            found += thing
        elif is_dataclass(thing) or isinstance(thing, StoredDistributions):
            found.append(vars(thing))
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_remembered_of_kept_distributions_is_what_is_held(fused):
    lm, data = LM(load(MODEL)[0]), kept_samples(17, 200)
    recipe = recipe_of(exit_layers=[2], fused=fused)
    config = TrainerConfig(epochs=2, holdout=1, cache_target_states=True, batch_tokens=200)
    seen = forward_target(
        lm, collate(data[:-1], 200, lm.device, stored=True), trainees(lm, [recipe], None), 256
    )
    told = expect(lm, [recipe], config, Text.of(data, 200)).memory["remembered states"]
    assert told == pytest.approx(held_by(vars(seen)), rel=0.05)


def test_text_that_is_not_learnt_costs_nothing():
    text = Text(1000, 400_000, 200_000, 500)
    config = TrainerConfig(cache_target_states=True, holdout=100)
    whole = expect(blueprint(MODEL), RECIPES, config, text)
    half = expect(blueprint(MODEL), RECIPES, replace(config, tokens=90_000), text)
    most = expect(blueprint(MODEL), RECIPES, replace(config, tokens=200_000), text)
    assert most == whole  # what is held out is not learnt anyway
    remembered = [told.memory["remembered states"] for told in (half, whole)]
    assert remembered[0] == pytest.approx(remembered[1] / 2, rel=0.01)
    assert half.steps == pytest.approx(whole.steps / 2, abs=1) and half.disk == whole.disk


def test_an_unknown_model_needs_the_hub():
    with pytest.raises(ModelNotFound, match=r"model\.path"):
        blueprint(ModelConfig(name="nobody", path="nobody/has-this"))


def test_random_weights_of_a_known_shape_have_that_shape():
    known, made = (ModelConfig("m", f"{how}lmsys/vicuna-7b-v1.3") for how in ("", "random:"))
    assert count(blueprint(known)) == count(blueprint(made))


def test_a_model_that_cannot_be_a_target_is_refused_by_its_config(tmp_path):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"cannot be a target: .*model\.path"):
        blueprint(ModelConfig("t5", str(tmp_path)))


def test_a_full_disk_is_refused_before_training(tmp_path, monkeypatch):
    expected = expect(blueprint(MODEL), RECIPES, TrainerConfig(), Text(200, 10_000, 8_000, 50))
    check_disk(expected, tmp_path)
    usage = namedtuple("usage", "total used free")(10, 9, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match="output="):
        check_disk(expected, tmp_path)


def test_rows_of_several_commands_become_one_table(tmp_path):
    file = tmp_path / "new" / "table.md"
    append({"training": "a", "steps": "1"}, file)
    append({"training": "b", "steps": "2"}, file)
    assert file.read_text().splitlines() == [
        "| training | steps |",
        "| --- | ---: |",
        "| a | 1 |",
        "| b | 2 |",
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cpus_speed_is_measured_in_flops_per_second(dtype):
    assert 1e8 < matmul_speed(dtype) < 1e14
