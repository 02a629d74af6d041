"""Listen, and run the routes until the process is told to stop."""

from __future__ import annotations

import logging
import socket

import uvicorn
from transformers import PreTrainedTokenizerBase

from kangaroo.serving.app import make_app
from kangaroo.serving.config import ServeConfig
from kangaroo.serving.scheduler import Scheduler
from kangaroo.utils.errors import ConfigError

log = logging.getLogger(__name__)


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


def run(
    listening: socket.socket,
    scheduler: Scheduler,
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    drafter: str,
    config: ServeConfig,
) -> None:
    """Serve; what runs when the process is told to stop is finished first."""
    app = make_app(scheduler, tokenizer, model, drafter, config)
    options = uvicorn.Config(
        app,
        limit_concurrency=config.most_connections,
        timeout_graceful_shutdown=int(config.grace) + 1,
        log_level="warning",
    )
    host, port, *_ = listening.getsockname()
    log.info("%s with %s: http://%s:%d", model, drafter, host, port)
    uvicorn.Server(options).run(sockets=[listening])
