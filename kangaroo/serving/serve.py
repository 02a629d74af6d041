"""From a model and a drafter to a server."""

from __future__ import annotations

from collections.abc import Callable

from kangaroo.api import load_target
from kangaroo.drafters.base import DrafterConfig
from kangaroo.engine import Engine
from kangaroo.errors import MissingPackage
from kangaroo.models import ModelConfig
from kangaroo.serving.config import ServeConfig
from kangaroo.serving.scheduler import Scheduler


def check_installed() -> None:
    """Errors: `MissingPackage` where the extra `serve` is not installed."""
    try:
        from kangaroo.serving import http  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"a server needs '{error.name}': pip install 'kangaroo[serve]', or in a checkout "
            "pip install -e '.[serve]'."
        ) from error


def serve(
    model: ModelConfig,
    drafter: DrafterConfig,
    config: ServeConfig,
    ready: Callable[[int], object] = lambda port: None,
) -> None:
    """Answer requests until the process is told to stop; then finish what runs.

    Args:
        ready: is told the port once everything is loaded; who came before that is answered now.

    Errors: `MissingPackage`; `ConfigError` where nothing can listen; what loading raises.
    """
    check_installed()
    from kangaroo.serving import http

    listening = http.listen(config)
    lm, tokenizer = load_target(model)
    longest = min(config.longest or lm.context, lm.context)
    engine = Engine(lm, drafter.build(lm), tokenizer, config.prefill_chunk)
    scheduler = Scheduler(engine, config.rows, longest, config.most_waiting).start()
    ready(listening.getsockname()[1])
    http.run(listening, scheduler, tokenizer, model.name, drafter.name, config)
