"""Our servers, each in a process of its own; none outlives the process that started it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType

from kangaroo.drafters.base import DrafterConfig
from kangaroo.models.loading import ModelConfig
from kangaroo.serving.config import ServeConfig
from kangaroo.serving.serve import serve
from kangaroo.under_load.client import tail
from kangaroo.under_load.config import Method
from kangaroo.utils.errors import ConfigError, KangarooError, ProcessLost

WATCH_SECONDS = 0.2
HEALTH_SECONDS = 10.0  # until a server that has a thread to spare has answered


@dataclass
class Server:
    """One that answers.

    Args:
        process: None where it is not ours.
        log: what it prints.
    """

    method: Method
    address: str
    process: SpawnProcess | None = None
    log: Path | None = None

    def check(self) -> None:
        """Errors: `ProcessLost` with the end of its log if it is gone."""
        if self.process is not None and self.log is not None and not self.process.is_alive():
            raise ProcessLost(
                f"the server of {self.method.name} has ended with code {self.process.exitcode}. "
                f"The end of '{self.log}':\n{tail(self.log)}"
            )


class Servers(AbstractContextManager["Servers"]):
    """Those of a measurement; each is started when it is first asked for.

    Args:
        config: of ours.
        alone: one at a time.
        folder: of their logs.
    """

    def __init__(self, model: ModelConfig, config: ServeConfig, alone: bool, folder: Path):
        self.model, self.config, self.alone, self.folder = model, config, alone, folder
        self.running: dict[str, Server] = {}

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def get(self, method: Method) -> tuple[Server, bool]:
        """The server of a method, and whether it was started for this.

        Errors: `ProcessLost` if it ends before it answers; what its model or drafter raises.
        """
        if method.name in self.running:
            return self.running[method.name], False
        if method.drafter is None:
            assert method.url is not None
            server = Server(method, method.url.rstrip("/").removesuffix("/v1"))
        else:
            if self.alone:
                self.stop()
            server = self._start(method, method.drafter)
        self.running[method.name] = server
        return server, True

    def _start(self, method: Method, drafter: DrafterConfig) -> Server:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe(duplex=False)
        log = self.folder / f"{method.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        task = there, log, self.model, drafter, self.config
        process = context.Process(target=_serve, args=task, name=method.name)
        process.start()
        there.close()
        server = Server(method, "", process, log)
        try:
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            server.address = f"http://{host}:{_heard(here, server)}"
            while not answers(server.address):
                server.check()
            return server
        except BaseException:
            stop(process, 0)
            raise

    def stop(self) -> None:
        """Stop ours: what they answer is finished first."""
        ours = [server.process for server in self.running.values() if server.process is not None]
        for process in ours:
            process.terminate()
        for process in ours:
            stop(process, self.config.grace)
        self.running.clear()


def stop(process: SpawnProcess, seconds: float) -> None:
    """Wait so long for a process to end, then end it."""
    process.join(seconds)
    process.kill()
    process.join()


def check_urls(urls: Mapping[str, str]) -> None:
    """Errors: `ConfigError` for one where nothing answers."""
    for name, url in urls.items():
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"urls.{name}={url} must begin with http:// or https://.")
        if not answers(url.rstrip("/").removesuffix("/v1")):
            raise ConfigError(
                f"urls.{name}={url}: no server answers GET /health there. Start it first."
            )


def answers(address: str) -> bool:
    """Whether a server says that it is well."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=HEALTH_SECONDS):
            return True
    except (OSError, ValueError):  # refused, not yet, or not well
        return False


def _heard(here: Connection, server: Server) -> int:
    """The port of a server that starts, or why it cannot."""
    while not here.poll(WATCH_SECONDS):
        server.check()
    try:
        told = here.recv()
    except EOFError:  # it ended without a word
        assert server.process is not None
        server.process.join()
        server.check()
        raise
    if isinstance(told, KangarooError):
        raise told
    assert isinstance(told, int)
    return told


def _serve(
    there: Connection, log: Path, model: ModelConfig, drafter: DrafterConfig, config: ServeConfig
) -> None:
    """What a server's process does."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, sys.stdout.fileno())
    os.dup2(stream, sys.stderr.fileno())
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s] %(message)s")
    logging.captureWarnings(True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # uvicorn ends what runs, then raises the signal again: this lets the interpreter end in order
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        serve(model, drafter, config, there.send)
    except KangarooError as error:
        logging.error("%s", error)
        there.send(error)


def _end_with_parent() -> None:
    """However that ends: nobody would stop this process then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
