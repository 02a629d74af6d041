"""Every experiment trains a few steps on a tiny model, and so does the paper's recipe."""

import inspect
import json
import math

import pytest
from commands import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from training_cases import curve

from kangaroo import cli
from kangaroo.heads.adapter_files import read_config

EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))
EXPERIMENTS.remove("methods")  # which evaluate.py takes: tests/project/test_page_commands.py
SETTINGS = """
    model=tiny output=out trainer.zero_stage=0 trainer.shard_target=false trainer.holdout=4
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
    roles = {"human": "What is {0} and {0}?", "gpt": "It is {0}{0}, and no less than that."}
    talks = [
        {"conversations": [{"from": role, "value": x.format(i)} for role, x in roles.items()]}
        for i in range(100, 120)
    ]
    (tmp_path / "ShareGPT.json").write_text(json.dumps(talks))
    source = f"data.source={tmp_path / 'ShareGPT.json'}"
    settings = {
        "recipe=paper": [source],
        "experiment=questions": [source, "data.max_answer_tokens=16", *FILTERS],
    }.get(asked, SYNTHESIS + FILTERS)
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        options = [*SETTINGS, asked, *settings, f"data.path={tmp_path / 'data'}"]
        config = OmegaConf.to_object(compose("train", options))
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
