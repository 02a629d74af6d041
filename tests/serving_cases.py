"""Schedulers and servers of a tiny model, and what is asked of them."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import uvicorn
from helpers import adapter_for
from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.models.loading import TINY, Dtype, ModelConfig, byte_tokenizer, load
from kangaroo.models.target import LM
from kangaroo.serving.app import make_app
from kangaroo.serving.config import ServeConfig
from kangaroo.serving.jobs import Event, Job
from kangaroo.serving.scheduler import Scheduler

LONGEST = 200
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=1.3, top_p=0.7),
    Sampling(temperature=0.8, top_k=4),
]


def target() -> LM:
    lm = LM(load(ModelConfig("tiny", TINY, dtype=Dtype.float32, device="cpu"))[0])
    return lm.compile_for_decoding()


def engine_of(lm: LM, chunk: int | None = 8) -> Engine:
    drafter = Kangaroo(lm, adapter_for(lm), steps=3, threshold=0)
    return Engine(lm, drafter, byte_tokenizer(), prefill_chunk=chunk, reuse=True)


@contextmanager
def scheduling(**changes: object) -> Iterator[Scheduler]:
    options: dict = {"max_batch_size": 3, "max_model_len": LONGEST, "max_queue": 64} | changes
    scheduler = Scheduler(options.pop("engine", None) or engine_of(target()), **options).start()
    try:
        yield scheduler
    finally:
        scheduler.close(60)


class Heard:
    """What a job is told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finish, self.reused = "", 0
        self.ended = threading.Event()
        self.begun = threading.Event()

    def __call__(self, event: Event) -> None:
        assert not self.finish, "nothing comes after the end"
        self.tokens += event.tokens
        self.reused += event.reused
        self.finish = event.finish
        self.begun.set()
        if event.finish:
            self.ended.set()


def job(request: Request, **options: object) -> tuple[Job, Heard]:
    heard = Heard()
    return Job(request, heard, **options), heard  # type: ignore[arg-type]


def random_request(rng: random.Random, most: int = 40) -> Request:
    prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 60))]
    seed, own = rng.randrange(1 << 40), rng.choice(SAMPLINGS)
    return Request(prompt, rng.randrange(1, most), seed, sampling=own, ignore_eos=True)


def alone(engine: Engine, request: Request) -> list[int]:
    done = dict(engine.completions([request], Sampling(), 1))
    return done[0].tokens


@contextmanager
def serving(tokenizer: PreTrainedTokenizerBase | None = None, **changes: object) -> Iterator[str]:
    """The address of a server in a thread."""
    tokenizer = tokenizer or byte_tokenizer()
    config = ServeConfig(**({"port": 0, "max_batch_size": 3, "max_model_len": LONGEST} | changes))  # type: ignore[arg-type]
    scheduler = Scheduler(
        engine_of(target()), config.max_batch_size, LONGEST, config.max_queue
    ).start()
    app = make_app(scheduler, tokenizer, "tiny", "kangaroo", config)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


PAGE = Path(__file__).parents[1] / "docs/serving.md"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def served(*options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """`scripts/serve.py` as a process of its own, once it answers."""
    port = free_port()
    script = PAGE.parents[1] / "scripts/serve.py"
    command = [sys.executable, str(script), f"port={port}", "model=tiny", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=120).is_success:
                    break
            time.sleep(0.1)
        assert process.poll() is None, process.communicate()[0]
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()
