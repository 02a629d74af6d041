"""Finished adapters side by side: the results are those of their training run."""

import json
import shutil

import pytest
import torch
from helpers import random_prompts, recipe_of, tiny

from kangaroo.training.compare import CompareConfig, compare, markdown
from kangaroo.training.config import TrainerConfig
from kangaroo.training.loop import Trainer
from kangaroo.utils.errors import AdapterNotFound, CorruptFile
from kangaroo.utils.tracking import NoTracker


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A target, its samples, and the folders of two adapters trained on all but three of them."""
    lm = tiny(dtype=torch.bfloat16)  # as adapters are saved, so that nothing is rounded twice
    samples = [
        {"messages": [], "input_ids": ids, "loss_mask": [0] * 5 + [1] * (len(ids) - 5)}
        for ids in random_prompts(*range(20, 32))
    ]
    recipes = [
        recipe_of(name="attention"),
        recipe_of(name="fused", fused=True, draft_steps=2, exit_layers=[1]),
    ]
    config = TrainerConfig(holdout=3, epochs=1, vocabulary=40, decode_prompts=3, decode_tokens=12)
    folder = tmp_path_factory.mktemp("run")
    about = {"fingerprint": "test"}
    trainer = Trainer(lm, samples, recipes, config, folder, about)
    return lm, samples, trainer.train(NoTracker())


def test_results_are_those_of_the_training_run(run):
    lm, samples, folders = run
    settings = CompareConfig([str(f) for f in folders], holdout=3, prompts=3, new_tokens=12)
    rows = compare(lm, samples, settings)
    assert [row["adapter"] for row in rows] == ["attention-exit3", "fused-exit1"]
    for row, folder in zip(rows, folders, strict=True):
        told = json.loads((folder / "config.json").read_text())["training"]["progress"]
        assert row["decoded"] == told["decoded"]
        assert row["positions"] == told["assistant_tokens"]
        assert row["held_out"].keys() == told["held_out"].keys()
        for name, value in told["held_out"].items():
            # then the adapter computed with float32 weights, and now with rounded ones
            assert row["held_out"][name] == pytest.approx(value, abs=0.1)


def test_the_table_has_a_line_for_each_adapter_the_best_first(run):
    lm, samples, folders = run
    settings = CompareConfig([str(f) for f in folders], holdout=3, prompts=2, new_tokens=9)
    rows = compare(lm, samples, settings)
    rows[1]["decoded"]["compression_rate"] = 9.0
    head, rule, best, other = markdown(rows).splitlines()
    assert best.startswith("| fused-exit1 | 1 |") and "| 9.00 |" in best
    assert len({line.count("|") for line in (head, rule, best, other)}) == 1


def test_an_adapter_that_does_not_say_how_it_was_trained_is_named(run, tmp_path):
    lm, samples, (folder, _) = run
    bare = shutil.copytree(folder, tmp_path / "bare")
    told = json.loads((bare / "config.json").read_text()) | {"training": {}}
    (bare / "config.json").write_text(json.dumps(told))
    with pytest.raises(CorruptFile, match=r"bare.*compare\.adapters"):
        compare(lm, samples, CompareConfig([str(bare)], holdout=3))


def test_an_adapter_that_is_nowhere_is_named(run):
    lm, samples, _ = run
    with pytest.raises(AdapterNotFound, match="no-such"):
        compare(lm, samples, CompareConfig(["./no-such-adapter"], holdout=3))
