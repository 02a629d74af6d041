"""Commands as a user types them, each in a process of its own, but with imports paid for once.

To start Python and import what the commands need takes ten seconds. So one process, the server,
imports and runs nothing. For each command it forks: the child takes over the command's folder,
environment, arguments and streams, runs the script as `__main__`, and ends as any interpreter does.
"""

import gc
import importlib
import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "kangaroo.cli.commands",
    "kangaroo.api",
    "datasets",
    "matplotlib.backends.backend_agg",
    "transformers.models.llama.modeling_llama",
)
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
STREAMS = ("stdin", "stdout", "stderr")
# What makes training brief, and data short: written by a model, or read from files.
BRIEF = "trainer.epochs=1 trainer.holdout=4 trainer.batch_tokens=256"
FILES = "data.max_answer_tokens=16 data.filters.max_repetition=1 data.filters.near_duplicate=1"
SHORT = (
    "data.shards=1 data.shard_size=12 data.max_question_tokens=8 "
    f"data.keep_unfinished_questions=true {FILES}"
)


def python(script: str, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT OPTIONS...` as typed in `cwd`; the script is named from the project's root, an
    action of its stands behind it."""
    file, *action = script.split()
    command = [str(ROOT / file), *action, *options]
    with tempfile.TemporaryDirectory() as folder:
        streams = {name: str(Path(folder, name)) for name in STREAMS}
        Path(streams["stdin"]).touch()
        job = {"environment": dict(os.environ), "argv": command, "cwd": str(cwd)}
        to, answers = server().stdin, server().stdout
        assert to is not None and answers is not None
        to.write(json.dumps(job | {"streams": streams}) + "\n")
        to.flush()
        code = int(answers.readline())
        written = [Path(streams[name]).read_text() for name in STREAMS[1:]]
    return subprocess.CompletedProcess(command, code, *written)


def typed(script: str, *options: str, cwd: Path) -> str:
    """What such a command prints, which has to succeed."""
    done = python(script, *options, cwd=cwd)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as listening:
        return listening.getsockname()[1]


@cache
def server() -> subprocess.Popen[str]:
    """It ends with this process, whose end closes its input."""
    # imports ask whether there is a GPU; by default that makes it useless to children
    environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)


def next_job() -> dict:
    """In each child the job that it is for; the server itself ends here with its input."""
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    raise SystemExit


def shown(page, program="torchrun"):
    """A program's commands in a page's code blocks, without their comments."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(), flags=re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]


def write_inputs(folder: Path) -> None:
    """Conversations in ShareGPT's form, and questions in Spec-Bench's."""
    talks = []
    for i in range(100, 124):
        question = {"from": "human", "value": f"What is {i} times {i * i}?"}
        answer = {"from": "gpt", "value": f"It is {i**3}, as {i} to the third."}
        talks.append({"conversations": [question, answer]})
    (folder / "ShareGPT.json").write_text(json.dumps(talks))
    asked = [{"category": "qa", "turns": [f"What is {i} and {i}?"]} for i in range(5)]
    lines = [json.dumps({"question_id": i} | question) for i, question in enumerate(asked)]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # what no collection looks at stays one copy for all
    job = next_job()
    for number, name in enumerate(STREAMS):
        opened = os.open(job["streams"][name], os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = os.fdopen(0)  # the server has read from the old one
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    sys.argv = job["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
