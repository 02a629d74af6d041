"""From a model and a drafter to a server."""

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated

from kangaroo.api import load_target
from kangaroo.drafters.base import DrafterConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.warm_up import warm_up
from kangaroo.models.loading import ModelConfig
from kangaroo.models.prompts import Tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.serving.scheduler import Scheduler
from kangaroo.utils import memory
from kangaroo.utils.errors import ConfigError, MissingPackage
from kangaroo.utils.folders import install
from kangaroo.utils.ranges import Count, NotNegative, Positive, Range, Ranged

log = logging.getLogger(__name__)


@dataclass
class ServeConfig(Ranged):
    """How a model is served.

    Args:
        host, port: where; by default this machine alone can reach it.
        allowed_hosts: names by which clients may call it, besides `host`, `localhost` and any
            address; `*` stands for any characters. Were all allowed, a page in a user's browser
            could let its own name lead here (DNS rebinding), and read the answers.
        max_batch_size: texts that are written at the same time.
        max_model_len: tokens of a text, prompt included; None is the model's context.
        prefill_chunk: tokens of a prompt that enter between two steps of other texts; None is as
            many as are quick.
        prefix_cache: a prompt that goes on from a text that a free row still has, as the next turn
            of a conversation does, is read from there on. How soon an answer begins then tells
            whether somebody has asked the same before.
        max_queue: requests that wait for a row; a further one is answered with 429.
        timeout: seconds from a request's arrival until it is given up; None is never.
        grace: seconds that running texts get when the server is stopped.
        api_key: what clients must send as their bearer token; None lets everybody in.
        most_bytes: of a request's body.
        most_connections: open at the same time; a further one is answered with 503.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, (1 << 16) - 1)] = 8000
    allowed_hosts: list[str] = field(default_factory=list)
    max_batch_size: Count = 16
    max_model_len: Count | None = None
    prefill_chunk: Count | None = None
    prefix_cache: bool = True
    max_queue: Count = 256
    timeout: Positive | None = 600.0
    grace: NotNegative = 30.0
    api_key: str | None = None
    most_bytes: Count = 1 << 20
    most_connections: Count = 1024


def listen(config: ServeConfig) -> socket.socket:
    """Where clients will be answered; who comes before that waits. Errors: `ConfigError` where
    nothing can listen there."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"nothing can listen on {config.host}:{config.port}: {error.strerror}. Pass another "
            "port= or host=."
        ) from error


def check_memory(lm: TargetModel, max_batch_size: int, max_model_len: int) -> None:
    """Log what keys and values of so many texts of such a length take from the start. Errors:
    `ConfigError` where they do not fit beside the model."""
    row = lm.new_cache(1, 1, lm.layer_devices).bytes() * max_model_len
    free = sum(map(memory.free, set(lm.layer_devices)))
    taken, left = f"{max_batch_size * row / 1e9:.1f} GB", f"{free / 1e9:.1f} GB"
    log.info(f"{max_batch_size} texts of up to {max_model_len} tokens: {taken} of keys and values")
    if max_batch_size * row <= free:
        return
    fix = f"max_batch_size={free // row} or " if free >= row else ""
    raise ConfigError(
        f"max_batch_size={max_batch_size} texts of up to {max_model_len} tokens take {taken} of "
        f"keys and values, and {left} are free beside the model. Pass {fix}max_model_len= fewer "
        "tokens."
    )


def serve(model: ModelConfig, drafter: DrafterConfig, config: ServeConfig) -> None:
    """Answer requests until the process is told to stop; then finish what runs. Who comes before
    everything is loaded, and on a GPU recorded, waits. Errors: `MissingPackage` without the extra
    `serve`; `ConfigError` as above; what loading raises."""
    try:
        import uvicorn

        from kangaroo.serving.app import Server
    except ModuleNotFoundError as error:
        raise MissingPackage(f"a server needs '{error.name}': {install('serve')}.") from error

    def loaded() -> tuple[Engine, Tokenizer, int]:
        lm, tokenizer = load_target(model)
        longest = min(config.max_model_len or lm.context, lm.context)
        check_memory(lm, config.max_batch_size, longest)
        engine = Engine(lm, drafter.build(lm), tokenizer, config.prefill_chunk, config.prefix_cache)
        warm_up(engine, config.max_batch_size, longest)
        return engine, tokenizer, longest

    listening = listen(config)
    # In a thread that ends, and its OpenMP threads with it: where a program has more of them than
    # there are processors, OpenMP puts those to sleep that wait for work.
    with ThreadPoolExecutor(1) as passing:
        engine, tokenizer, longest = passing.submit(loaded).result()
    scheduler = Scheduler(engine, config.max_batch_size, longest, config.max_queue)
    host, port, *_ = listening.getsockname()
    options = uvicorn.Config(
        Server(scheduler, tokenizer, model.name, drafter.name, config).app(),
        limit_concurrency=config.most_connections,
        timeout_graceful_shutdown=int(config.grace) + 1,
        log_level="warning",
    )
    log.info("%s with %s: http://%s:%d", model.name, drafter.name, host, port)
    uvicorn.Server(options).run(sockets=[listening])
