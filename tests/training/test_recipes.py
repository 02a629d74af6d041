"""Which training a model takes, and that each recipe and experiment trains on a tiny model."""

import inspect
import json
import math
from dataclasses import replace

import pytest
from commands import ROOT, talks
from composing import MODELS, of_command
from helpers import recipe_of
from omegaconf import OmegaConf
from training_cases import curve

from kangaroo import cli
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.adapter_files import read_config
from kangaroo.models.random_models import SHAPES
from kangaroo.training.recipe import TrainerConfig

OWN = {"smollm2-135m", "tiny"}
LARGE = sorted(set(MODELS) - OWN)
PAPER = {"vicuna-7b": 2, "vicuna-13b": 3, "llama-2-13b-chat": 3}  # exit layers that it names


def composed(*overrides):
    return OmegaConf.to_object(of_command("train", ["output=out", *overrides]))


@pytest.mark.parametrize("model", LARGE)
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
    config = composed("model=vicuna-13b", "model.path=/my/folder", "model.name=mine")
    assert config.adapter.exit_layers == [3] and config.trainer.learning_rate == 5e-5
    assert config.data.path == "outputs/data/sharegpt/mine"
    config = composed("model=tiny", "recipe=vicuna-13b")
    assert config.adapter.exit_layers == [3] and config.trainer.learning_rate == 5e-5


EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))
EXPERIMENTS.remove("methods")  # which evaluate.py takes: tests/project/test_commands.py
SETTINGS = """
    model=tiny trainer.zero_stage=0 trainer.shard_target=false trainer.holdout=4
    trainer.batch_tokens=256 trainer.epochs=1 trainer.save_every=100 trainer.decode_prompts=2
    trainer.decode_tokens=8
""".split()
FILTERS = ["data.filters.max_repetition=1", "data.filters.near_duplicate=1"]
SYNTHESIS = """
    data.shards=1 data.shard_size=12 data.max_question_tokens=8 data.max_answer_tokens=16
    data.keep_unfinished_questions=true
""".split()


@pytest.mark.parametrize("asked", [f"experiment={name}" for name in EXPERIMENTS] + ["recipe=paper"])
def test_every_experiment_trains_a_few_steps_on_a_tiny_model(asked, tmp_path):
    """One process in plain torch: `test_scale.py` holds that others end with the same weights."""
    (tmp_path / "ShareGPT.json").write_text(json.dumps(talks()))
    source = f"data.source={tmp_path / 'ShareGPT.json'}"
    settings = {
        "recipe=paper": [source],
        "experiment=questions": [source, "data.max_answer_tokens=16", *FILTERS],
    }.get(asked, SYNTHESIS + FILTERS)
    config = composed(*SETTINGS, asked, *settings, f"data.path={tmp_path / 'data'}")
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
