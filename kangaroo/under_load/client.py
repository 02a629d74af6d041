"""guidellm asks a server, and what it measured: a process of its own for each cell."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kangaroo.utils.errors import DataError, MissingPackage, ProcessLost
from kangaroo.utils.folders import install

CLIENT = "guidellm"
WATCH_SECONDS = 0.2
TOLD_LINES = 12  # of a log, in an error


class TooFew(DataError):
    """The client made fewer requests than it was told to, without an error of any."""


@dataclass(frozen=True)
class Measured:
    """A cell, as guidellm has it: means over its requests, seconds from a request's first byte.

    Args:
        tokens_per_second: of all users together.
        first_token: until then, s.
        between_tokens: from the first token to the last, for each after the first, s.
        total: until the end, s.
        tokens_per_part: of the stream's parts after the first: the tokens of a step.
        texts: answers by their questions.
    """

    tokens_per_second: float
    first_token: float
    between_tokens: float
    total: float
    tokens_per_part: float
    texts: dict[str, str]


def client_version() -> str:
    """guidellm's. Errors: `MissingPackage`."""
    if importlib.util.find_spec(CLIENT) is None:
        raise MissingPackage(
            f"the load comes from '{CLIENT}', which is not installed: {install('load')}."
        )
    return version(CLIENT)


def write_prompts(questions: Sequence[str], new_tokens: int, file: Path) -> None:
    """The requests of a cell, as guidellm reads them."""
    rows = [{"prompt": text, "output_tokens_count": new_tokens} for text in questions]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def scenario(
    address: str, prompts: Path, requests: int, users: int, output: Path
) -> dict[str, Any]:
    """What guidellm is told to do: greedy chats, streamed, every request once."""
    return {
        "spec": {
            "backend": {
                "kind": "openai_http",
                "target": address,
                "request_format": "/v1/chat/completions",
                "http2": False,
                "extras": {"body": {"temperature": 0}},
            },
            "profile": {"kind": "concurrent", "streams": [users]},
            "constraints": [{"kind": "max_requests", "count": requests}],
            "data": [{"kind": "json_file", "path": str(prompts)}],
            "outputs": [{"kind": "json", "path": str(output)}],
        }
    }


def measure(told: dict[str, Any], output: Path, check: Callable[[], None]) -> None:
    """Let guidellm do it; its file is there afterwards, whole, or not at all.

    Args:
        check: called all the while; it raises if the server is gone.

    Errors: `ProcessLost` with the end of guidellm's log where that fails.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    log, plan = output.with_suffix(".log"), output.with_suffix(".scenario.json")
    plan.write_text(json.dumps(told), encoding="utf-8")
    # one process suffices for so few users, and leaves the processor to the server
    environment = os.environ | {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    command = [sys.executable, "-m", CLIENT, "run", "-c", str(plan), "--disable-console"]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # its own processes end with it
        )
        try:
            while process.poll() is None:
                check()
                try:
                    process.wait(WATCH_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    written = Path(told["spec"]["outputs"][0]["path"])
    if process.returncode != 0 or not written.is_file():
        raise ProcessLost(
            f"{CLIENT} has ended with code {process.returncode} before it had measured "
            f"{output.stem}. The end of '{log}':\n{tail(log)}"
        )
    os.replace(written, output)
    plan.unlink()
    log.unlink()


def tail(log: Path) -> str:
    """The last lines of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-TOLD_LINES:])


def read(file: Path, requests: int, new_tokens: int) -> Measured:
    """What a cell's file says.

    Errors: `TooFew` where the client did not make all requests; `DataError` where requests failed
    or answers have another length than was asked for.
    """
    try:
        (benchmark,) = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
        asked, metrics = benchmark["requests"], benchmark["metrics"]
        failed = [*asked["errored"], *asked["incomplete"]]
        done = asked["successful"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"'{file}' is no result of {CLIENT}. Delete it, and run again.") from error
    if failed or len(done) != requests:
        told = f"{len(done)} of {requests} requests were answered"
        if not failed:
            raise TooFew(f"{told}: {CLIENT} asked no more. Run it again ('{file}').")
        why = next((one["info"]["error"] for one in failed if one["info"]["error"]), "no reason")
        raise DataError(f"{told}: {why} ('{file}').")
    lengths = {one["output_metrics"]["total_tokens"] for one in done}
    if lengths != {new_tokens}:
        raise DataError(
            f"'{file}': answers have {min(lengths)} to {max(lengths)} tokens instead of "
            f"{new_tokens}. Does the server know 'ignore_eos' and 'max_completion_tokens'?"
        )

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return Measured(
        tokens_per_second=mean("output_tokens_per_second"),
        first_token=mean("time_to_first_token_ms") / 1000,
        between_tokens=mean("inter_token_latency_ms") / 1000,
        total=mean("request_latency"),
        tokens_per_part=mean("iter_tokens_per_iteration"),
        texts={_question(one): one["output"] for one in done},
    )


def _question(one: dict[str, Any]) -> str:
    """The text that was asked."""
    (message,) = json.loads(one["request_args"])["body"]["messages"]
    return "".join(part["text"] for part in message["content"])
