"""The command that tunes a drafter."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from kangaroo.api import load_target
from kangaroo.cli.command import command, plain, varied
from kangaroo.cli.schema import TuneCommand
from kangaroo.drafters.base import DrafterConfig
from kangaroo.evaluation import comparison
from kangaroo.evaluation import tune as tuning
from kangaroo.models.loading import options_of
from kangaroo.utils.folders import command_line

log = logging.getLogger(__name__)


@command("tune", goes_on=True)
def tune(config: TuneCommand) -> None:
    """Search and report; write the drafter's settings."""
    drafters: dict[str, DrafterConfig] = {}
    for name, drafter in ({config.drafter.name: config.drafter} | config.more).items():
        for variant, each in varied(drafter, config.search.get(name, {})).items():
            drafters[name + variant.removeprefix(drafter.name)] = each
    lm, tokenizer = load_target(config.model)
    target = options_of(config.model.path, config.model.name)
    use = command_line("evaluate", f"--config-dir={config.output}", **target, drafter="tuned")
    settings = {"model": plain(config)["model"], "use": use}
    report = tuning.tune(lm, tokenizer, drafters, config.drafter, config, **settings)
    comparison.show(report, Console())
    log.info("%s and %s are in %s", tuning.PAGE, tuning.SETTINGS, Path(config.output))
    log.info("use it: %s", use)
