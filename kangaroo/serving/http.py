"""Run the routes until the process is told to stop."""

from __future__ import annotations

import uvicorn
from transformers import PreTrainedTokenizerBase

from kangaroo.errors import ConfigError
from kangaroo.serving.app import make_app
from kangaroo.serving.config import ServeConfig
from kangaroo.serving.scheduler import Scheduler


def run(
    scheduler: Scheduler,
    tokenizer: PreTrainedTokenizerBase,
    model: str,
    drafter: str,
    config: ServeConfig,
) -> None:
    """Serve; what runs when the process is told to stop is finished first.

    Errors: `ConfigError` where nothing could listen there.
    """
    app = make_app(scheduler, tokenizer, model, drafter, config)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            limit_concurrency=config.most_connections,
            timeout_graceful_shutdown=int(config.grace) + 1,
            log_level="warning",
        )
    )
    server.run()
    if not server.started:
        raise ConfigError(
            f"nothing can listen on {config.host}:{config.port}; is another server running there? "
            "Pass another port=."
        )
