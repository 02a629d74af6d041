"""Measures servers by guidellm at several numbers of concurrent users (docs/serving.md).

    python integrations/load_test/load_test.py          # a server for each of four drafters
    python integrations/load_test/load_test.py vanilla mine="drafter=hybrid drafter.nodes=5"
    python integrations/load_test/load_test.py vanilla vllm=http://127.0.0.1:9000

All servers answer the same questions. At each number of users the methods take turns, and
ratios to vanilla are taken within a round, so a machine that slows down favours no method. Each
finished cell (a method, a number of users, a round) is a file, so a stopped run can be resumed.
"""

import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from load_report import BASELINE, Cell, curves, markdown, summarise

from kangaroo.evaluation import records
from kangaroo.evaluation.bench import BenchConfig, fingerprint, load_questions
from kangaroo.utils.errors import ConfigError, DataError, KangarooError, MissingPackage, ProcessLost
from kangaroo.utils.folders import install
from kangaroo.utils.provenance import git_revision

CLIENT = "guidellm"
SERVE = Path(__file__).parents[2] / "scripts/serve.py"
# Runs a server that ends with this process, since its standard input then ends.
CHILD = """import os, runpy, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")"""
ATTEMPTS = 3  # at a cell, since the client sometimes asks too few questions


class TooFew(DataError):
    """The client made fewer requests than it should have, without any error."""


def cells(rounds: int, users: list[int], methods: list[str]) -> list[Cell]:
    """All cells in the order of measurement; each round begins with another method."""
    orders = [methods[i % len(methods) :] + methods[: i % len(methods)] for i in range(rounds)]
    return [Cell(i, n, method) for i, order in enumerate(orders) for n in users for method in order]


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=10):
            return True
    except (OSError, ValueError):
        return False


def process_lost(process: subprocess.Popen[bytes], log: Path) -> ProcessLost:
    end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
    return ProcessLost(f"It has ended with code {process.returncode}. The end of '{log}':\n{end}")


@dataclass(frozen=True)
class Server:
    """A running server; `process` is None where we did not start it."""

    address: str
    log: Path
    process: subprocess.Popen[bytes] | None = None


@contextmanager
def serving(options: str, log: Path) -> Iterator[Server]:
    """A new server with these options, or the running one at that address."""
    if options.startswith("http"):
        address = options.rstrip("/").removesuffix("/v1")
        if not is_healthy(address):
            raise ConfigError(f"{options}: no server answers GET /health there. Start it first.")
        yield Server(address, log)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(SERVE), *shlex.split(options), f"port={port}", "prefix_cache=false"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *words],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        while not is_healthy(address := f"http://127.0.0.1:{port}"):
            if process.poll() is not None:
                raise process_lost(process, log)
            time.sleep(0.2)
        yield Server(address, log, process)
    finally:
        process.terminate()  # it finishes its answers first
        process.wait()


def ask(
    server: Server, prompts: Path, requests: int, users: int, output: Path, *, options: Namespace
) -> None:
    """Let guidellm send every request once, as a chat with a fixed seed, and write its results to
    `output`, whole. Errors: `ProcessLost`, with the end of the log of guidellm or the server."""
    output.parent.mkdir(parents=True, exist_ok=True)
    log, plan = output.with_suffix(".log"), output.with_suffix(".scenario.json")
    partial = output.with_suffix(".partial.json")
    backend: dict[str, Any] = {
        "kind": "openai_http",
        "target": server.address,
        "request_format": "/v1/chat/completions",
    }
    body = {"temperature": options.temperature, "seed": 0}
    backend |= {"http2": False, "stream": options.stream, "extras": {"body": body}}
    spec = {
        "backend": backend,
        "profile": {"kind": "concurrent", "streams": [users]},
        "constraints": [{"kind": "max_requests", "count": requests}],
        "data": [{"kind": "json_file", "path": str(prompts)}],
        "outputs": [{"kind": "json", "path": str(partial)}],
    }
    plan.write_text(json.dumps({"spec": spec}), encoding="utf-8")
    with log.open("wb") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", CLIENT, "run", "-c", str(plan), "--disable-console"],
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=subprocess.STDOUT,
            # one process suffices for so few users, and leaves the processor to the server
            env=os.environ | {"GUIDELLM__MAX_WORKER_PROCESSES": "1"},
            start_new_session=True,  # to end its child processes with it
        )
        try:
            while process.poll() is None:
                if server.process is not None and server.process.poll() is not None:
                    raise process_lost(server.process, server.log)
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode != 0 or not partial.is_file():
        raise process_lost(process, log)
    os.replace(partial, output)
    plan.unlink()
    log.unlink()


def read(file: Path, requests: int, max_new_tokens: int) -> dict[str, Any]:
    """A cell's results: `METRICS`, `tokens_per_part`, and `texts` by their questions. Errors:
    `TooFew` for missing requests; `DataError` for failed ones and answers of a wrong length."""
    try:
        (benchmark,) = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
        requested, metrics = benchmark["requests"], benchmark["metrics"]
        failed = [*requested["errored"], *requested["incomplete"]]
        answered = requested["successful"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"'{file}' is no result of {CLIENT}. Delete it, and run again.") from error
    if failed or len(answered) != requests:
        counts = f"{len(answered)} of {requests} requests were answered"
        if not failed:
            raise TooFew(f"{counts}: {CLIENT} asked no more. Run it again ('{file}').")
        reason = next((f["info"]["error"] for f in failed if f["info"]["error"]), "no reason")
        raise DataError(f"{counts}: {reason} ('{file}').")
    lengths = {answer["output_metrics"]["total_tokens"] for answer in answered}
    if lengths != {max_new_tokens}:
        raise DataError(
            f"'{file}': answers have {min(lengths)} to {max(lengths)} tokens instead of "
            f"{max_new_tokens}. Does the server know 'ignore_eos' and 'max_completion_tokens'?"
        )

    def question(answer: dict[str, Any]) -> str:
        (message,) = json.loads(answer["request_args"])["body"]["messages"]
        return "".join(part["text"] for part in message["content"])

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return {
        "tokens_per_second": mean("output_tokens_per_second"),
        "first_token": mean("time_to_first_token_ms") / 1000,
        "between_tokens": mean("inter_token_latency_ms") / 1000,
        "total": mean("request_latency"),
        "tokens_per_part": mean("iter_tokens_per_iteration"),
        "texts": {question(answer): answer["output"] for answer in answered},
    }


def measure(options: Namespace, methods: dict[str, str]) -> dict[Cell, dict[str, Any]]:
    """The results of all cells, measuring those that have none yet."""
    if find_spec(CLIENT) is None:
        raise MissingPackage(f"the load comes from '{CLIENT}': {install('load')}.")
    folder, requests = options.output, options.requests
    questions = load_questions(BenchConfig(path=options.bench))
    chosen = [questions[i * len(questions) // requests] for i in range(requests)]
    settings = {"git_revision": git_revision(), CLIENT: version(CLIENT), "requests": requests}
    settings |= {"bench": options.bench or "demo", "bench.fingerprint": fingerprint(chosen)}
    settings |= {"max_new_tokens": options.max_new_tokens, "methods": methods}
    settings |= {"temperature": options.temperature, "stream": options.stream}
    records.start_run(folder, settings, {}, True)
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": question.turns[0]} for question in chosen]
    rows = [row | {"output_tokens_count": options.max_new_tokens} for row in rows]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    order = cells(options.rounds, options.users, list(methods))
    missing = [cell for cell in order if not cell.file(folder).is_file()]
    logging.info("%d of %d cells are in %s already", len(order) - len(missing), len(order), folder)
    running: dict[str, Server] = {}
    with ExitStack() as servers:
        for cell in missing:
            if cell.method not in running:
                if options.alone:
                    servers.close()
                    running.clear()
                log = folder / "servers" / f"{cell.method}.log"
                server = servers.enter_context(serving(methods[cell.method], log))
                running[cell.method] = server
                most, warmup = max(options.users), folder / f"warmup-{cell.method}.json"
                ask(server, prompts, min(2 * most, requests), most, warmup, options=options)
                warmup.unlink()
            server = running[cell.method]
            unchecked = cell.file(folder).with_suffix(".unread")
            for attempts_left in reversed(range(ATTEMPTS)):
                ask(server, prompts, requests, cell.users, unchecked, options=options)
                try:  # an invalid result ends the run now, not after hours
                    read(unchecked, requests, options.max_new_tokens)
                    break
                except TooFew as error:
                    if not attempts_left:
                        raise
                    logging.warning("%s It is measured again.", error)
            os.replace(unchecked, cell.file(folder))
    return {cell: read(cell.file(folder), requests, options.max_new_tokens) for cell in order}


def positive(word: str) -> int:
    """A whole number above 0, for argparse."""
    if (number := int(word)) < 1:
        raise ValueError
    return number


def parsed(words: list[str]) -> tuple[Namespace, dict[str, str]]:
    """The options, and the methods: the servers' options or addresses by name."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("methods", nargs="*", help="DRAFTER, NAME='options of serve.py', NAME=URL")
    add("--serve", default="", help="options of serve.py for all of ours")
    add("--users", type=positive, nargs="+", default=[1, 2, 4, 8, 16])
    add("--requests", type=positive, default=32, help="of a cell, the same in all")
    add("--max-new-tokens", type=positive, default=64, help="an EOS does not end them")
    add("--rounds", type=positive, default=3, help="repetitions of all measurements")
    add("--bench", help="a file of questions (without it the demo bench)")
    add("--temperature", type=float, default=0, help="every request has seed 0")
    add("--no-stream", dest="stream", action="store_false", help="whole answers")
    add("--alone", action="store_true", help="one server at a time")
    add("--output", type=Path, default=Path("outputs/load"))
    options = parser.parse_args(words)
    if max(options.users) > options.requests:
        parser.error(
            f"--requests {options.requests} are fewer than the {max(options.users)} of --users; "
            "twice as many or more keep all users busy."
        )
    methods = {}
    for word in options.methods or [BASELINE, "kangaroo", "draft_model", "hybrid"]:
        name, sign, server = word.partition("=")
        if not name or (sign and not server):
            parser.error(f"{word!r}: pass a DRAFTER, NAME='options of serve.py', or NAME=URL.")
        if name in methods:
            parser.error(f"two methods are called {name}: pass another NAME= for one of them.")
        started = f"{server or f'drafter={name}'} {options.serve}".strip()
        methods[name] = server if server.startswith("http") else started
    return options, methods


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options, methods = parsed(sys.argv[1:])
    try:
        summary = summarise(measure(options, methods), records.read_run(options.output))
    except KangarooError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    records.write_json(options.output / "load.json", summary)
    (options.output / "load.md").write_text(markdown(summary), encoding="utf-8")
    curves(summary).savefig(options.output / "load.png", dpi=150)
    sys.stdout.write(markdown(summary))


if __name__ == "__main__":
    main()
