"""The command that serves a model."""

from __future__ import annotations

import logging

from kangaroo.api import load_target
from kangaroo.cli.command import command
from kangaroo.cli_schema import ServeCommand
from kangaroo.engine import Engine
from kangaroo.errors import ConfigError
from kangaroo.serving.scheduler import Scheduler

log = logging.getLogger(__name__)


@command("serve")
def serve(config: ServeCommand) -> None:
    """Answer requests until it is stopped; then finish what runs."""
    try:
        from kangaroo.serving import http
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a server needs '{error.name}': pip install 'kangaroo[serve]', or in a checkout "
            "pip install -e '.[serve]'."
        ) from error
    listening = http.listen(config)
    lm, tokenizer = load_target(config.model)
    longest = min(config.longest or lm.context, lm.context)
    engine = Engine(lm, config.drafter.build(lm), tokenizer, config.prefill_chunk)
    scheduler = Scheduler(engine, config.rows, longest, config.most_waiting).start()
    names = config.model.name, config.drafter.name
    http.run(listening, scheduler, tokenizer, *names, config)
