"""The GPU script runs to its end where there is no GPU, and its results become a page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import adapter_for, tiny
from test_commands import talks

from kangaroo.benchmark.gpu_page import page
from kangaroo.benchmark.speed import SpeedConfig, measure
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.models import byte_tokenizer

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/gpu.sh"
STAGES = ["check", "shapes", "data", "train", "adapters", "methods", "pack"]


def gpu_script(results: Path, *stages: str, **settings: str) -> subprocess.CompletedProcess[str]:
    settings = {"RESULTS": str(results), "PYTHON": sys.executable, "DRY": "1"} | settings
    command = ["bash", SCRIPT, *stages]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def speed():
    lm = tiny(vocab_size=259, max_position_embeddings=4096)
    config = SpeedConfig(
        prompts=1,
        new_tokens=8,
        repeats=1,
        contexts=[32],
        context_tokens=8,
        batches=[1],
        phase_context=40,
        bandwidth_megabytes=1,
        rivals=False,
    )
    drafter = Kangaroo(lm, adapter_for(lm), 6, 0.0)
    return measure(lm, byte_tokenizer(), drafter, config)


def test_a_stage_that_is_done_is_not_done_again_and_others_are_refused_by_name(tmp_path):
    (tmp_path / "data.done").touch()
    done = gpu_script(tmp_path, "data", "pictures")
    assert done.returncode == 1
    assert "data is done already" in done.stdout
    assert "no stage 'pictures'; there are check shapes data" in done.stderr


@pytest.mark.slow
def test_the_text_may_be_answers_to_questions_of_ones_own(tmp_path):
    (tmp_path / "asked.json").write_text(json.dumps(talks()))
    done = gpu_script(tmp_path, "data", "train", QUESTIONS=str(tmp_path / "asked.json"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    about = json.loads((tmp_path / "data/provenance.json").read_text())
    assert about["conversations"] == 16 and about["settings"]["source"].endswith("asked.json")
    assert (tmp_path / "train/attention-exit2/config.json").is_file()


def test_a_stage_without_what_it_goes_on_from_says_so(tmp_path):
    done = gpu_script(tmp_path, "train", PYTHON="true")  # finds all the memory that is asked for
    assert done.returncode == 1 and "there is no data" in done.stdout


def test_a_stage_without_memory_says_so(tmp_path):
    huge = SCRIPT.read_text().replace("GIB=(1 ", "GIB=(100000 ")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/gpu.sh").write_text(huge)
    command = ["bash", tmp_path / "scripts/gpu.sh", "check"]
    settings = {"DRY": "1", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 1 and "check needs 100000 GiB and CPU has" in done.stderr


def test_stages_take_less_than_nine_minutes_each_and_half_an_hour_together():
    (line,) = [line for line in SCRIPT.read_text().splitlines() if line.startswith("SECONDS_OF")]
    seconds = [int(word) for word in line.partition("(")[2].rstrip(")").split()]
    assert len(seconds) == len(STAGES) and max(seconds) < 9 * 60 and sum(seconds) < 30 * 60


@pytest.mark.slow
def test_all_stages_run_on_a_cpu_with_the_same_lengths(tmp_path):
    done = gpu_script(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all((tmp_path / f"{stage}.done").exists() for stage in STAGES)
    assert (tmp_path / "results.tgz").stat().st_size < 16 * 2**20
    made = page(tmp_path)
    assert "Not run yet" not in made and "says nothing of one" in made
    for name in ("vicuna-7b-v1.3", "Llama-3.1-8B-Instruct", "kangaroo_tree", "fused-exit3"):
        assert name in made


def test_the_page_says_what_is_unproven(tmp_path):
    assert page(tmp_path).count("Not run yet: unproven.") == 5
    assert "Nothing here has run on a GPU yet.**" in page(tmp_path)
    committed = (ROOT / "docs/gpu.md").read_text()
    assert committed == page(tmp_path) or "Measured on" in committed


def test_the_page_holds_a_shape_against_what_is_asked_of_it(tmp_path, speed):
    speed = json.loads(json.dumps(speed))
    speed["provenance"]["hardware"]["cuda"] = "NVIDIA H100"
    speed["methods"]["vanilla"] |= {"tokens_per_second": 200.0, "share_of_limit": 0.8}
    for row in speed["phases"]["verification"]:
        row["ms"] = 5.0 + 0.2 * row["tokens"]
    file = tmp_path / "shapes/vicuna-7b-v1.3/speed.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(speed))
    (tmp_path / "check.log").write_text("....\n=== 80 passed, 3 skipped in 61.20s ===\n")
    made = page(tmp_path)
    assert "Measured on NVIDIA H100, torch" in made
    assert "`pytest -m gpu`: 80 passed, 3 skipped in 61.20s." in made
    assert "| vicuna-7b-v1.3 | 200.0 | 80% reached | 1.23 **missed** |" in made
    (tmp_path / "check.log").write_text("....\nKilled\n")
    assert "The tests did not end." in page(tmp_path)
