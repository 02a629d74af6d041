"""From a model and a drafter to a server."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from transformers import PreTrainedTokenizerBase

from kangaroo.api import load_target
from kangaroo.drafters.base import DrafterConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.warm_up import warm_up
from kangaroo.models.loading import ModelConfig
from kangaroo.models.target import LM
from kangaroo.serving.config import ServeConfig
from kangaroo.serving.scheduler import Scheduler
from kangaroo.utils import memory
from kangaroo.utils.errors import ConfigError, MissingPackage
from kangaroo.utils.folders import install

log = logging.getLogger(__name__)


def check_installed() -> None:
    """Errors: `MissingPackage` where the extra `serve` is not installed."""
    try:
        import uvicorn  # noqa: F401

        from kangaroo.serving import app  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackage(f"a server needs '{error.name}': {install('serve')}.") from error


def listen(config: ServeConfig) -> socket.socket:
    """Where clients will be answered; who comes before that waits.

    Errors: `ConfigError` where nothing can listen there.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"nothing can listen on {config.host}:{config.port}: {error.strerror}. Pass another "
            "port= or host=."
        ) from error


def check_memory(lm: LM, rows: int, longest: int) -> None:
    """Raise `ConfigError` where keys and values of so many texts of `longest` tokens do not fit
    beside the model: they have their place from the start. Log what they take.
    """
    row = lm.cache_like(1, 1, lm.layer_devices).bytes() * longest
    free = sum(map(memory.free, set(lm.layer_devices)))
    taken, left = f"{rows * row / 1e9:.1f} GB", f"{free / 1e9:.1f} GB"
    log.info(f"{rows} texts of up to {longest} tokens: {taken} of keys and values")
    if rows * row <= free:
        return
    fix = f"rows={free // row} or " if free >= row else ""
    raise ConfigError(
        f"rows={rows} texts of up to {longest} tokens take {taken} of keys and values, and "
        f"{left} are free beside the model. Pass {fix}longest= fewer tokens."
    )


def _loaded(
    model: ModelConfig, drafter: DrafterConfig, config: ServeConfig
) -> tuple[Engine, PreTrainedTokenizerBase, int]:
    lm, tokenizer = load_target(model)
    longest = min(config.longest or lm.context, lm.context)
    check_memory(lm, config.rows, longest)
    engine = Engine(lm, drafter.build(lm), tokenizer, config.prefill_chunk, config.reuse)
    warm_up(engine, config.rows, longest)
    return engine, tokenizer, longest


def serve(
    model: ModelConfig,
    drafter: DrafterConfig,
    config: ServeConfig,
    ready: Callable[[int], object] = lambda port: None,
) -> None:
    """Answer requests until the process is told to stop; then finish what runs.

    Args:
        ready: is told the port once everything is loaded, and on a GPU recorded; who came before
            that is answered now.

    Errors: `MissingPackage`; `ConfigError` where nothing can listen, or the rows take more memory
    than there is; what loading raises.
    """
    check_installed()
    import uvicorn

    from kangaroo.serving.app import Server

    listening = listen(config)
    # In a thread that ends, and its OpenMP threads with it: where a program has more of them than
    # there are processors, OpenMP puts those to sleep that wait for work.
    with ThreadPoolExecutor(1) as passing:
        engine, tokenizer, longest = passing.submit(_loaded, model, drafter, config).result()
    scheduler = Scheduler(engine, config.rows, longest, config.most_waiting).start()
    host, port, *_ = listening.getsockname()
    ready(port)
    options = uvicorn.Config(
        Server(scheduler, tokenizer, model.name, drafter.name, config).app(),
        limit_concurrency=config.most_connections,
        timeout_graceful_shutdown=int(config.grace) + 1,
        log_level="warning",
    )
    log.info("%s with %s: http://%s:%d", model.name, drafter.name, host, port)
    uvicorn.Server(options).run(sockets=[listening])
