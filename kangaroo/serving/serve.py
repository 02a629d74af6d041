"""Starts a server for a model and a drafter."""

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated

from kangaroo.api import load_target_for
from kangaroo.drafters.base import DrafterConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.warm_up import warm_up
from kangaroo.models.loading import ModelConfig
from kangaroo.models.prompts import Tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.serving.scheduler import Scheduler
from kangaroo.utils import memory
from kangaroo.utils.errors import ConfigError, MissingPackage, explained
from kangaroo.utils.folders import install
from kangaroo.utils.ranges import Count, NotNegative, Positive, Range, Ranged, TextLength

log = logging.getLogger(__name__)


@dataclass
class ServeConfig(Ranged):
    """How a model is served.

    Args:
        allowed_hosts: host names of the server, besides `host`, `localhost` and IP addresses; `*`
            matches any characters. Other names are refused, since a web page could otherwise read
            answers by pointing its own name to the server (DNS rebinding).
        prefix_cache: a prompt that continues a text in a free row, such as the next turn of a
            conversation, reuses its keys and values. The time to the first token then reveals
            whether somebody has sent the same prompt before.
    """

    host: str = "127.0.0.1"  # by default only this machine can reach the server
    port: Annotated[int, Range(0, (1 << 16) - 1)] = 8000  # for clients; 0 takes a free one
    allowed_hosts: list[str] = field(default_factory=list)
    max_batch_size: Count = 16  # texts that are decoded at the same time
    max_model_len: TextLength | None = None  # of prompt and answer; None is the model's context
    prefill_chunk: Count | None = None  # tokens read between two steps; None takes what is fast
    prefix_cache: bool = True
    max_queue: Count = 256  # requests that wait for a row; further ones get status 429
    timeout: Positive | None = 600.0  # seconds until a request is ended; None is never
    grace: NotNegative = 30.0  # seconds to finish running texts when the server is stopped
    api_key: str | None = None  # the bearer token that clients must send; None needs no token
    most_bytes: Count = 1 << 20  # of a request's body
    most_connections: Count = 1024  # open at the same time; further ones get status 503


def listen(config: ServeConfig) -> socket.socket:
    """A listening socket. Errors: `ConfigError` where nothing can listen at this address."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    problem = f"nothing can listen on {config.host}:{config.port}"
    with explained(ConfigError, problem, "Pass another port= or host=."):
        return socket.create_server((config.host, config.port), family=family, backlog=2048)


def check_memory(lm: TargetModel, max_batch_size: int, max_model_len: int) -> None:
    """Log the KV cache's size. Errors: `ConfigError` where it does not fit beside the model."""
    row = lm.new_cache(1, 1).bytes() * max_model_len
    free = sum(map(memory.free, set(lm.layer_devices)))
    texts = f"{max_batch_size} texts of up to {max_model_len} tokens"
    size = f"{max_batch_size * row / 1e9:.1f} GB"
    log.info(f"{texts}: {size} of keys and values")
    if max_batch_size * row > free:
        fix = f"max_batch_size={free // row} or " if free >= row else ""
        raise ConfigError(
            f"max_batch_size={texts} take {size} of keys and values, and {free / 1e9:.1f} GB are "
            f"free beside the model. Pass {fix}max_model_len= fewer tokens."
        )


def serve(model: ModelConfig, drafter: DrafterConfig, config: ServeConfig) -> None:
    """Serve requests until the process is stopped; then finish running texts. Requests wait while
    the model is loaded. Errors: `MissingPackage`; `ConfigError` as above; those of loading."""
    try:
        import uvicorn

        from kangaroo.serving.app import Server
    except ModuleNotFoundError as error:
        raise MissingPackage(f"a server needs '{error.name}': {install('serve')}.") from error

    def load() -> tuple[Engine, Tokenizer, int]:
        lm, tokenizer = load_target_for(model, drafter)
        max_model_len = min(config.max_model_len or lm.context, lm.context)
        check_memory(lm, config.max_batch_size, max_model_len)
        engine = Engine(
            lm,
            drafter.build(lm),
            tokenizer,
            prefill_chunk=config.prefill_chunk,
            prefix_cache=config.prefix_cache,
        )
        warm_up(engine, config.max_batch_size, max_model_len)
        return engine, tokenizer, max_model_len

    listener = listen(config)
    # In a thread of its own, whose OpenMP threads end with it: with more of them than processors,
    # OpenMP puts waiting threads to sleep, which slows decoding.
    with ThreadPoolExecutor(1) as executor:
        engine, tokenizer, max_model_len = executor.submit(load).result()
    scheduler = Scheduler(engine, config.max_batch_size, max_model_len, config.max_queue)
    host, port, *_ = listener.getsockname()
    options = uvicorn.Config(
        Server(scheduler, tokenizer, model=model.name, drafter=drafter.name, limits=config).app(),
        limit_concurrency=config.most_connections,
        timeout_graceful_shutdown=int(config.grace) + 1,
        log_level="warning",
    )
    log.info("%s with %s: http://%s:%d", model.name, drafter.name, host, port)
    uvicorn.Server(options).run(sockets=[listener])
