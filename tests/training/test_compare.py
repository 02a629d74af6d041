"""Finished adapters side by side: the results are those of their training run."""

import json
import shutil

import pytest
import torch
from helpers import tiny
from training_cases import config, recipe, samples, train

from kangaroo.training.compare import CompareConfig, compare, markdown
from kangaroo.utils.errors import AdapterNotFound, CorruptFile


def test_results_are_those_of_the_training_run_in_a_table_the_best_first(tmp_path):
    lm, data = tiny(dtype=torch.bfloat16), samples(12)  # as saved, so that nothing is rounded twice
    recipes = [recipe(), recipe(name="fused", fused=True, draft_steps=2, exit_layers=[1])]
    options = {"holdout": 3, "epochs": 1, "vocabulary": 40, "decode_prompts": 3}
    folders = train(lm, data, config(decode_tokens=12, **options), tmp_path, recipes=recipes)
    settings = CompareConfig([str(f) for f in folders], holdout=3, prompts=3, new_tokens=12)
    rows = compare(lm, data, settings)
    assert [row["adapter"] for row in rows] == ["attention-exit2", "fused-exit1"]
    for row, folder in zip(rows, folders, strict=True):
        told = json.loads((folder / "config.json").read_text())["training"]["progress"]
        assert row["decoded"] == told["decoded"]
        assert row["positions"] == told["assistant_tokens"]
        assert row["held_out"].keys() == told["held_out"].keys()
        for name, value in told["held_out"].items():
            # then the adapter computed with float32 weights, and now with rounded ones
            assert row["held_out"][name] == pytest.approx(value, abs=0.1)
    rows[1]["decoded"]["compression_rate"] = 9.0
    head, rule, best, other = markdown(rows).splitlines()
    assert best.startswith("| fused-exit1 | 1 |") and "| 9.00 |" in best
    assert len({line.count("|") for line in (head, rule, best, other)}) == 1

    bare = shutil.copytree(folders[0], tmp_path / "bare")
    told = json.loads((bare / "config.json").read_text()) | {"training": {}}
    (bare / "config.json").write_text(json.dumps(told))
    with pytest.raises(CorruptFile, match=r"bare.*compare\.adapters"):
        compare(lm, data, CompareConfig([str(bare)], holdout=3))
    with pytest.raises(AdapterNotFound, match="no-such"):
        compare(lm, data, CompareConfig(["./no-such-adapter"], holdout=3))
