"""Every `torchrun` line of README and docs runs as a user types it, in two processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import PAGES, ROOT, free_port, shown
from stand_ins import BRIEF, FEW, ONE, SHORT

from kangaroo import cli
from kangaroo.heads.adapter_files import WEIGHTS

SHAREGPT = f"recipe=vicuna-7b data.source=ShareGPT.json {ONE} {BRIEF}"
# What is appended to each line; a line that is not here fails.
APPENDED = {
    "train.py model=vicuna-7b": SHAREGPT,
    "train.py model=vicuna-7b data.source=ShareGPT.json": SHAREGPT,
    "train.py model=vicuna-7b trainer.accumulate=32": SHAREGPT,
    "train.py model=vicuna-7b trainer=deepspeed": SHAREGPT,
    "train.py model=vicuna-33b trainer.shard_target=true": SHAREGPT,
    "scripts/make_data.py model=vicuna-7b recipe=own_text": f"{ONE} {BRIEF} {SHORT}",
    "evaluate.py bench=spec_bench": f"model=tiny {FEW}",
    "evaluate.py model=vicuna-7b bench=spec_bench": FEW,
}
LINES = list({" ".join(words): words for page in PAGES for words in shown(page)}.values())


def typed(line):
    """A command without torchrun and its options."""
    first = next(i for i, word in enumerate(line) if word.endswith(".py"))
    return " ".join(line[first:])


def start(line, folder):
    """The processes of a command, one a node, as a user would start them in `folder`: with two
    processes in all, and a tiny target. (A recipe is its model's own.)
    """
    nodes, port = 2 if "--nnodes=4" in line else 1, free_port()
    replaced = {f"--nproc-per-node={n}": f"--nproc-per-node={2 // nodes}" for n in (4, 8)}
    replaced |= {f"model={name}": "model=tiny" for name in ("vicuna-7b", "vicuna-33b")}
    replaced |= {
        "--nnodes=4": "--nnodes=2",
        "--rdzv-endpoint=node0:29500": f"--rdzv-endpoint=localhost:{port}",
    }
    words = [replaced.get(word, word) for word in line[1:]]
    script = next(word for word in words if word.endswith(".py"))
    words = [str(ROOT / word) if word == script else word for word in words]
    words += APPENDED.get(typed(line), "").split()
    # torchrun's own port is one for all: tests run side by side
    environment = os.environ | {"PET_MASTER_PORT": str(free_port())}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return [subprocess.Popen(command, cwd=folder, env=environment, **pipes) for _ in range(nodes)]


def bytes_of(folder, pattern):
    """The content of all files of a kind, by name."""
    files = sorted((folder / "outputs").rglob(pattern))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_every_torchrun_line_has_its_stand_ins():
    assert {typed(line) for line in LINES} == set(APPENDED)


def check_trained(here):
    (about,) = bytes_of(here, "attention-exit2/config.json").values()
    assert json.loads(about)["training"]["processes"] == 2 and bytes_of(here, WEIGHTS)


def run(line, folder):
    for process in start(line, folder):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def marked(line):
    """The README's first one is quick enough."""
    marks = [pytest.mark.slow] * (typed(line) != "train.py model=vicuna-7b")
    return pytest.param(line, marks=marks, id=" ".join(line[1:]))


@pytest.mark.parametrize("line", list(map(marked, LINES)))
def test_a_line_of_the_pages_runs_in_two_processes(line, here):
    run(line, here)
    if typed(line).startswith("train.py"):
        check_trained(here)
    elif typed(line).startswith("scripts/make_data.py"):
        assert bytes_of(here, "*.arrow") and not bytes_of(here, "*.safetensors")
    else:
        records = bytes_of(here, "records-*.jsonl").values()
        assert [content.count(b"\n") for content in records] == [3, 2]
        (summary,) = (
            s
            for f, s in bytes_of(here, "summary.json").items()
            if "/vanilla/" not in f and "/transformers/" not in f
        )
        assert json.loads(summary)["lossless"]["identical"] == 5


def kill_second(running, path):
    """Kill rank 1, without a chance to clean up, as soon as `path` is there."""
    (torchrun,) = running
    deadline = time.monotonic() + 120
    while not path.exists():
        assert torchrun.poll() is None and time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    second = next(c for c in children if b"\0RANK=1\0" in Path(f"/proc/{c}/environ").read_bytes())
    os.kill(int(second), signal.SIGKILL)
    _, errors = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 1 and "SIGKILL" in errors


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the second process in /proc")
def test_a_process_killed_in_writing_and_in_training_changes_no_byte(here):
    """Two processes, one of them killed twice, make the data and the adapter that one makes."""
    settings = ["experiment=debug", "data.shards=4", "data.max_answer_tokens=160"]
    two = ["torchrun", "--nproc-per-node=2", "train.py", *settings]
    shards = here / "outputs/data/self_synthesis/tiny.shards"
    # the first file of all: a shard has none until it is whole
    kill_second(start(two, here), shards / "settings.json")
    assert not (shards / "00001.jsonl").exists() and not (shards / "00003.jsonl").exists()
    kill_second(start(two, here), here / "outputs/train/tiny/checkpoint.pt")
    run(two, here)
    (alone := here / "alone").mkdir()
    run(["torchrun", "--nproc-per-node=1", "train.py", *settings, "trainer.accumulate=2"], alone)
    for pattern in (WEIGHTS, "data/**/*.jsonl", "data/**/*.arrow"):
        assert bytes_of(here, pattern) == bytes_of(alone, pattern) != {}


@pytest.mark.parametrize("name", ["chat", "convert_import"])
def test_a_command_for_one_process_refuses_more(name, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["it.py", f"hydra.run.dir={tmp_path}"])
    with pytest.raises(SystemExit, match=r"it\.py runs in one process, and torchrun started 2"):
        vars(cli)[name]()
