"""Every `torchrun` line of README and docs runs as a user types it, in two processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import adapter_for

from kangaroo import cli
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter_files import WEIGHTS
from kangaroo.models.loading import TINY, Dtype, ModelConfig, load
from kangaroo.models.target import TargetModel

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

# What stands in for a cluster and for a large target, in every line. (A recipe is its model's own.)
REPLACED = {
    "--nproc-per-node=8": "--nproc-per-node=2",
    "--nproc-per-node=4": "--nproc-per-node=2",
    "model=vicuna-7b": "model=tiny",
    "model=vicuna-33b": "model=tiny",
}
# The same on nodes: two of them, of one process each.
REPLACED_ON_NODES = REPLACED | {
    "--nnodes=4": "--nnodes=2",
    "--nproc-per-node=8": "--nproc-per-node=1",
}

SMALL = (
    "adapter.exit_layers=[2] trainer.epochs=1 trainer.holdout=4 trainer.decode_prompts=2 "
    "trainer.batch_tokens=256"
)
SHAREGPT = f"data.source=ShareGPT.json {SMALL}"
WRITTEN = (
    f"{SMALL} data.shard_size=8 data.max_question_tokens=8 data.max_answer_tokens=16 "
    "data.keep_unfinished_questions=true"
)
ASKED = "bench.path=questions.jsonl drafter.adapter=adapter max_new_tokens=6 warmup=1"

# What is appended to each line; a line that is not here fails.
APPENDED = {
    "train.py model=vicuna-7b": f"recipe=vicuna-7b {SHAREGPT}",
    "train.py model=vicuna-7b data.source=ShareGPT.json": f"recipe=vicuna-7b {SMALL}",
    "train.py model=vicuna-7b trainer.accumulate=32": f"recipe=vicuna-7b {SHAREGPT}",
    "train.py model=vicuna-7b trainer=deepspeed": f"recipe=vicuna-7b {SHAREGPT}",
    "train.py model=vicuna-33b trainer.shard_target=true": f"recipe=vicuna-33b {SHAREGPT}",
    "scripts/make_data.py model=vicuna-7b recipe=own_text": WRITTEN,
    "evaluate.py bench=spec_bench": f"model=tiny {ASKED}",
    "evaluate.py model=vicuna-7b bench=spec_bench": ASKED,
}
# Three Python processes with all imports take half a minute: one line is enough for every change.
FAST = "train.py model=vicuna-7b"


# Commands that one process does, with an action where it has several.
ALONE = [
    *("chat", "speed", "convert import", "convert export"),
    *("prepare datastore", "prepare layers", "prepare calibrate"),
]


def shown(page, program="torchrun"):
    """A program's commands in a page's code blocks, without their comments."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(), flags=re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]


def asked(command):
    """A command without torchrun and its options."""
    first = next(i for i, word in enumerate(command) if word.endswith(".py"))
    return " ".join(command[first:])


COMMANDS = list({" ".join(words): words for page in PAGES for words in shown(page)}.values())


def marked(command):
    is_slow = asked(command) != FAST or "--nnodes=4" in command
    return pytest.param(command, id=" ".join(command[1:]), marks=[pytest.mark.slow] * is_slow)


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def start(command, folder):
    """The processes of a command, one a node, as a user would start them in `folder`."""
    script, *options = asked(command).split()
    on_nodes = "--nnodes=4" in command
    replaced = (REPLACED_ON_NODES if on_nodes else REPLACED) | {
        "--rdzv-endpoint=node0:29500": f"--rdzv-endpoint=localhost:{free_port()}"
    }
    launcher = [replaced.get(word, word) for word in command[1 : command.index(script)]]
    overrides = [replaced.get(word, word) for word in options]
    whole = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *launcher,
        ROOT / script,
        *overrides,
        *APPENDED.get(asked(command), "").split(),
    ]
    # torchrun's own port is one for all: tests run side by side
    own = {"PET_MASTER_PORT": str(free_port())}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(whole, cwd=folder, env=os.environ | own, **pipes)
        for _ in range(2 if on_nodes else 1)
    ]


def run(command, folder):
    """Run it, and demand that it succeeds."""
    running = start(command, folder)
    ends = [(process.communicate(timeout=300)[1], process.returncode) for process in running]
    for errors, code in ends:
        assert code == 0, errors


def talks():
    """Conversations in ShareGPT's form."""
    return [
        {
            "conversations": [
                {"from": "human", "value": f"What is {i} times {i * i}?"},
                {"from": "gpt", "value": f"It is {i**3}, as {i} to the third."},
            ]
        }
        for i in range(100, 124)
    ]


def questions():
    """In Spec-Bench's form."""
    return [
        {"question_id": i, "category": "qa", "turns": [f"What is {i} and {i}?"]} for i in range(5)
    ]


@pytest.fixture
def folder(tmp_path):
    """Where a user might stand: conversations, questions and an adapter lie there."""
    (tmp_path / "ShareGPT.json").write_text(json.dumps(talks()))
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions())) + "\n")
    lm = TargetModel(load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))[0])
    adapter = adapter_for(lm)
    about = adapter_files.describe(lm, adapter, {"progress": {"assistant_tokens": 7}})
    adapter_files.save(adapter, about, torch.tensor([3]), tmp_path / "adapter")
    return tmp_path


def weights(folder):
    return (folder / "outputs/train/tiny/attention-exit2" / WEIGHTS).read_bytes()


def bytes_of(folder, pattern):
    """The content of all files of a kind, by name."""
    found = sorted((folder / "outputs").rglob(pattern))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def check(command, folder):
    """What it says it makes is there, made by two processes."""
    if asked(command).startswith("train.py"):
        (about,) = bytes_of(folder, "attention-exit2/config.json").values()
        assert json.loads(about)["training"]["processes"] == 2
        assert weights(folder) and bytes_of(folder, "*.arrow")
    elif asked(command).startswith("scripts/make_data.py"):
        assert bytes_of(folder, "*.arrow") and not bytes_of(folder, "*.safetensors")
    else:
        records = bytes_of(folder, "records-*.jsonl").values()
        assert [content.count(b"\n") for content in records] == [3, 2]
        (summary,) = bytes_of(folder, "summary.json").values()
        assert json.loads(summary)["lossless"]["identical"] == 5


def kill_second(running, path):
    """Kill rank 1, without a chance to clean up, as soon as `path` is there."""
    (torchrun,) = running
    deadline = time.monotonic() + 120
    while not path.exists():
        assert torchrun.poll() is None and time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    (second,) = (
        int(child)
        for child in children
        if b"RANK=1" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
    )
    os.kill(second, signal.SIGKILL)
    _, errors = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 1 and "SIGKILL" in errors


def test_every_torchrun_line_has_its_stand_ins():
    assert {asked(command) for command in COMMANDS} == set(APPENDED)


@pytest.mark.parametrize("command", [marked(words) for words in COMMANDS])
def test_a_line_of_the_pages_runs_in_two_processes(command, folder):
    run(command, folder)
    check(command, folder)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["evaluate.py bench=spec_bench", "train.py model=vicuna-7b"])
def test_a_line_that_is_run_again_changes_nothing(line, folder):
    command = next(words for words in COMMANDS if asked(words) == line)
    run(command, folder)
    first = bytes_of(folder, "*.safetensors") | bytes_of(folder, "answers.jsonl")
    run(command, folder)
    check(command, folder)
    assert first == bytes_of(folder, "*.safetensors") | bytes_of(folder, "answers.jsonl") != {}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the second process in /proc")
def test_a_process_killed_in_writing_and_in_training_changes_no_byte(folder):
    """Two processes, one of them killed twice, make the data and the adapter that one makes."""
    settings = ["experiment=debug", "data.shards=4", "data.max_answer_tokens=160"]
    two = ["torchrun", "--nproc-per-node=2", "train.py", *settings]
    shards = folder / "outputs/data/self_synthesis/tiny.shards"
    # the first file of all: a shard has none until it is whole
    kill_second(start(two, folder), shards / "settings.json")
    assert not (shards / "00001.jsonl").exists() and not (shards / "00003.jsonl").exists()
    kill_second(start(two, folder), folder / "outputs/train/tiny/checkpoint.pt")
    run(two, folder)
    alone = folder / "alone"
    alone.mkdir()
    run(["torchrun", "--nproc-per-node=1", "train.py", *settings, "trainer.accumulate=2"], alone)
    assert weights(folder) == weights(alone)
    for made in ("data/**/*.jsonl", "data/**/*.arrow"):
        assert bytes_of(folder, made) == bytes_of(alone, made) != {}


@pytest.mark.parametrize("command", ALONE)
def test_a_command_for_one_process_refuses_more(command, tmp_path, monkeypatch):
    name, *action = command.split()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["it.py", *action, f"hydra.run.dir={tmp_path}"])
    said = " ".join([r"it\.py", *action, "runs in one process, and torchrun started 2"])
    with pytest.raises(SystemExit, match=said):
        vars(cli)[name]()
