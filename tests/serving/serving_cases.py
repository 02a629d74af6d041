"""Schedulers and servers of a tiny model, and what is asked of them."""

import json
import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import httpx
import uvicorn
from commands import ROOT, free_port
from fastapi import FastAPI
from helpers import adapter_for, chain_of, tiny_target
from transformers import PreTrainedTokenizerBase

from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.serving.app import Server
from kangaroo.serving.scheduler import Event, Job, Scheduler
from kangaroo.serving.serve import ServeConfig

LONGEST = 200
SAMPLINGS = [Sampling(), Sampling(1.0), Sampling(1.3, top_p=0.7), Sampling(0.8, top_k=4)]


def target() -> TargetModel:
    return tiny_target().compile_for_decoding()


def engine_of(lm: TargetModel, chunk: int | None = 8) -> Engine:
    drafter = chain_of(lm, adapter_for(lm), steps=3, threshold=0)
    return Engine(lm, drafter, byte_tokenizer(), prefill_chunk=chunk, prefix_cache=True)


other_engine = cache(lambda: engine_of(target()))


def alone(request: Request) -> list[int]:
    """What an engine with nothing else to do writes."""
    return dict(other_engine().completions([request], Sampling(), 1))[0].tokens


@contextmanager
def scheduling(engine: Engine | None = None, **changes: int) -> Iterator[Scheduler]:
    options = {"max_batch_size": 3, "max_model_len": LONGEST, "max_queue": 64} | changes
    scheduler = Scheduler(engine or engine_of(target()), **options)
    try:
        yield scheduler
    finally:
        scheduler.close(60)


class Heard(Job):
    """A job that keeps what it is told."""

    def __init__(self, request: Request, deadline: float = math.inf):
        super().__init__(request, self.hear, deadline)
        self.tokens: list[int] = []
        self.finish, self.reused = "", 0
        self.begun, self.ended = threading.Event(), threading.Event()

    def hear(self, event: Event) -> None:
        assert not self.finish, "nothing comes after the end"
        self.tokens += event.step.tokens
        self.reused += event.reused
        self.finish = event.finish
        self.begun.set()
        if event.finish:
            self.ended.set()

    def check(self) -> None:
        assert self.ended.wait(60)
        assert self.tokens == alone(self.request)
        assert self.finish == ("stop" if self.request.stop else "length")


def answered(scheduler: Scheduler, *jobs: Heard) -> None:
    scheduler.submit(*jobs)
    for job in jobs:
        job.check()


def job_of(prompt: list[int], new_tokens: int, seed: int = 0) -> Heard:
    return Heard(Request(prompt, new_tokens, seed, ignore_eos=True))


def written(scheduler: Scheduler, prompt: list[int]) -> Heard:
    answered(scheduler, job := job_of(prompt, 9))
    return job


def random_request(rng: random.Random, most: int = 40) -> Request:
    prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 60))]
    seed, sampling = rng.randrange(1 << 40), rng.choice(SAMPLINGS)
    return Request(prompt, rng.randrange(1, most), seed, sampling=sampling, ignore_eos=True)


def as_body(request: Request) -> dict:
    sampling = request.sampling
    assert sampling is not None
    body = {"prompt": request.prompt, "max_tokens": request.max_new_tokens, "seed": request.seed}
    how = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    return body | how | {"ignore_eos": True}


def error_of(answer: httpx.Response) -> dict:
    return json.loads(answer.text.removeprefix("data: "))["error"]


def server_app(
    tokenizer: PreTrainedTokenizerBase | None = None, longest: int = LONGEST, **changes: object
) -> FastAPI:
    config = ServeConfig(**({"max_batch_size": 3} | changes))  # type: ignore[arg-type]
    scheduler = Scheduler(engine_of(target()), config.max_batch_size, longest, config.max_queue)
    return Server(scheduler, tokenizer or byte_tokenizer(), "tiny", "kangaroo", config).app()


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The address of a server in a thread."""
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


def serving(**options: Any) -> AbstractContextManager[str]:
    return running(server_app(**options))


@contextmanager
def served(*options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """`scripts/serve.py` as a process of its own, once it answers."""
    port = free_port()
    script = ROOT / "scripts/serve.py"
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
