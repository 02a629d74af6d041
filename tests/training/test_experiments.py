"""Every experiment trains a few steps on a tiny model, and so does the paper's recipe."""

import inspect
import json
import math

import pytest
from commands import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kangaroo import cli
from kangaroo.heads.adapter_files import read_config
from kangaroo.training.checkpoint import METRICS

EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))
for name in ("methods", "compare"):  # which evaluate.py takes: tests/project/test_page_commands.py
    EXPERIMENTS.remove(name)


def composed(*overrides, command="train"):
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        return OmegaConf.to_object(compose(command, ["output=out", *overrides]))


def sharegpt(path):
    talks = [
        {
            "id": f"talk{i}",
            "conversations": [
                {"from": "human", "value": f"What is {i} and {i}?"},
                {"from": "gpt", "value": f"It is {2 * i}, and twice that is {4 * i}."},
            ],
        }
        for i in range(100, 120)
    ]
    path.write_text(json.dumps(talks))
    return path


@pytest.mark.parametrize("asked", [f"experiment={name}" for name in EXPERIMENTS] + ["recipe=paper"])
def test_every_experiment_trains_a_few_steps_on_a_tiny_model(asked, tmp_path):
    """One process in plain torch: `test_scale.py` holds that others end with the same weights."""
    settings = ["trainer.zero_stage=0", "trainer.shard_target=false", "trainer.holdout=4"]
    settings += ["trainer.batch_tokens=256", "trainer.epochs=1", "trainer.save_every=100"]
    settings += ["trainer.decode_prompts=2", "trainer.decode_tokens=8"]
    talks = f"data.source={sharegpt(tmp_path / 'ShareGPT.json')}"
    if asked.startswith("recipe"):
        settings.append(talks)
    elif asked == "experiment=questions":
        settings += [talks, "data.max_answer_tokens=16", "data.filters.max_repetition=1"]
        settings += ["data.filters.near_duplicate=1"]
    else:
        settings += ["data.shards=1", "data.shard_size=12", "data.max_question_tokens=8"]
        settings += ["data.max_answer_tokens=16", "data.keep_unfinished_questions=true"]
        settings += ["data.filters.max_repetition=1", "data.filters.near_duplicate=1"]
    settings += ["model=tiny", f"data.path={tmp_path / 'data'}"]
    config = composed(asked, *settings)
    config.output = str(tmp_path / "out")
    recipes = [config.adapter, *config.more.values()]
    for recipe in recipes:  # tiny has six layers
        recipe.exit_layers = sorted({min(layer, 5) for layer in recipe.exit_layers})
    inspect.unwrap(cli.train)(config)
    metrics = [json.loads(line) for line in (tmp_path / "out" / METRICS).read_text().splitlines()]
    assert metrics
    for recipe in recipes:
        for layer in recipe.exit_layers:
            folder = f"{recipe.name}-exit{layer}"
            assert math.isfinite(metrics[-1][f"train/{folder}/loss"])
            assert read_config(tmp_path / "out" / folder).architecture == recipe.architecture
