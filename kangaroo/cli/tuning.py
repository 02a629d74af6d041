"""The command that tunes a drafter."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from kangaroo.api import load_target
from kangaroo.cli.command import command, plain
from kangaroo.cli_schema import TuneCommand
from kangaroo.tuning import report
from kangaroo.tuning.tune import tune as find_best

log = logging.getLogger(__name__)


@command("tune")
def tune(config: TuneCommand) -> None:
    """Search, confirm and report; write the drafter's settings."""
    lm, tokenizer = load_target(config.model)
    model = plain(config)["model"]
    found = find_best(lm, tokenizer, config.drafter, config, model=model)
    bench, dtype = config.bench.name, str(lm.dtype).removeprefix("torch.")
    report.write(found, config, f"{config.model.name} on {bench}, {dtype}, {lm.device.type}")
    report.show(found, Console())
    log.info("%s, %s and plots are in %s", report.PAGE, report.SETTINGS, Path(config.output))
