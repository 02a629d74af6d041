"""The GPU script runs to its end where there is no GPU, and its results become a page."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

SCRIPT = ROOT / "scripts/gpu.sh"
PAGE = runpy.run_path(str(ROOT / "scripts/gpu/page.py"))
MARK, STAGES, page, write = (PAGE[name] for name in ("MARK", "STAGES", "page", "write"))

# In the place of Python: the 8B shape fails, SmolLM2's adapter takes too long, all else ends well.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
  -c*) echo '{"hardware": {"cuda": "H100"}, "versions": {"torch": "2", "transformers": "5"},
    "git_revision": "abc", "time": "now"}' ;;
  *name=8b*) echo out of memory; exit 3 ;;
  *adapter.name=brief*) echo as far as this; exec sleep 60 ;;
esac
"""


def gpu_script(
    results: Path, *stages: str, script: Path = SCRIPT, **settings: str
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"RESULTS": str(results), "PYTHON": sys.executable, "DRY": "1"}
    how = {"cwd": ROOT, "env": environment | settings, "capture_output": True, "text": True}
    return subprocess.run(["bash", script, *stages], **how)


def stand_in(folder: Path, text: str = STAND_IN) -> str:
    file = folder / "python"
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


def test_a_stage_that_fails_or_takes_too_long_stops_no_other_and_is_tried_again(tmp_path):
    (tmp_path / "scripts").mkdir()
    short = tmp_path / "scripts/gpu.sh"
    short.write_text(SCRIPT.read_text().replace("[adapter]=120", "[adapter]=1"))
    results, python = tmp_path / "results", stand_in(tmp_path)
    assert gpu_script(results, script=short, DRY="", PYTHON=python).returncode == 1
    ran = {name: results / f"{name}.json" for name in STAGES if name != "methods"}
    status = {name: json.loads(file.read_text())["status"] for name, file in ran.items()}
    assert {name: x for name, x in status.items() if x} == {"8b": 3, "adapter": 124}
    text = page(results)
    failed = r"\*\*Failed after \d s, with status 3\*\* on H100; torch 2, "
    assert re.search(failed, text) and "out of memory" in text
    assert "**Ran out of its 1 s**" in text and "as far as this" in text
    file = tmp_path / "gpu.md"
    file.write_text(f"# By hand\n\nA figure.\n\n{MARK}\n\nOld results.\n")
    write(results, file)  # which keeps what people wrote
    assert file.read_text() == f"# By hand\n\nA figure.\n\n{MARK}\n\n{text}"

    well = stand_in(tmp_path, STAND_IN.replace("exit 3", "exit 0"))
    again = gpu_script(results, "7b", "8b", script=short, DRY="", PYTHON=well)
    assert again.returncode == 0
    assert "7b is done already" in again.stdout and "8b ended with status 0" in again.stdout
    assert "bits" not in again.stdout and "Failed" not in page(results)


def test_an_unknown_stage_is_refused_by_name_and_so_is_a_machine_without_a_gpu(tmp_path):
    done = gpu_script(tmp_path, "pictures")
    assert "no stage 'pictures'; there are part1, part2 and bits kernels" in done.stderr
    none = stand_in(tmp_path, """echo '{"hardware": {"cuda": null}}'""")
    done = gpu_script(tmp_path / "none", DRY="", PYTHON=none)
    assert done.returncode == 1 and "there is no GPU here; DRY=1" in done.stderr


# In the order of the script; a stage takes up to a minute.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("bits", "pytest: 2 passed in "),
        ("kernels", "**Verification**"),
        ("tests", "pytest: 2 passed in "),
        ("soak", "texts that differ: 0."),
        ("plain", " tokens/s** (the median step)"),
        ("fused", " tokens/s** (the median step)"),
        ("7b", "**Decoding over the context**"),
        ("8b", "**Verification**"),
        ("methods", "| kangaroo_tree | "),
    ],
)
def test_every_stage_runs_on_a_cpu(tmp_path, stage, words):
    done = gpu_script(tmp_path, stage)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    text = (tmp_path / "gpu.md").read_text()
    assert words in text and "a CPU, which says nothing of a GPU" in text
    assert text.count("Not run.") == len(STAGES) - 1


@pytest.mark.slow
def test_an_adapter_is_trained_and_three_drafters_measured(tmp_path):
    done = gpu_script(tmp_path, "adapter", "drafters")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"| {name} | " in text for name in ("kangaroo", "hybrid", "tree"))
