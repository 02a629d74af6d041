"""The command that tunes a drafter."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from kangaroo.api import load_target
from kangaroo.cli.command import command, plain
from kangaroo.cli.schema import TuneCommand
from kangaroo.evaluation import comparison
from kangaroo.evaluation.tune import page
from kangaroo.evaluation.tune.search import tune as find_best
from kangaroo.models.loading import options_of
from kangaroo.utils.folders import command_line

log = logging.getLogger(__name__)


@command("tune", goes_on=True)
def tune(config: TuneCommand) -> None:
    """Search, confirm and report; write the drafter's settings."""
    lm, tokenizer = load_target(config.model)
    model = plain(config)["model"]
    tuned = find_best(lm, tokenizer, config.drafter, config, model=model)
    bench, dtype = config.bench.name, str(lm.dtype).removeprefix("torch.")
    about = f"{config.model.name} on {bench}, {dtype}, {lm.device.type}"
    target = options_of(config.model.path, config.model.name)
    use = command_line("evaluate", f"--config-dir={config.output}", **target, drafter="tuned")
    page.write(tuned, config, about, use)
    comparison.show(tuned.report, Console())
    log.info("%s and %s are in %s", page.PAGE, page.SETTINGS, Path(config.output))
    log.info("use it: %s", use)
