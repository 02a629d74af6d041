"""Commands that decode with a drafter: time it, tune it, talk to it, serve it."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from kangaroo import chat as talk
from kangaroo.api import load_target
from kangaroo.cli.command import command, plain, varied
from kangaroo.cli.schema import ChatCommand, ServeCommand, SpeedCommand, TuneCommand
from kangaroo.drafters.base import DrafterConfig
from kangaroo.engine.engine import Engine
from kangaroo.evaluation import comparison
from kangaroo.evaluation import tune as tuning
from kangaroo.evaluation.speed import report as speed_report
from kangaroo.evaluation.speed.speed import measure
from kangaroo.models.loading import options_of
from kangaroo.serving.serve import serve as run_server
from kangaroo.utils.folders import command_line

log = logging.getLogger(__name__)


@command()
def speed(config: SpeedCommand) -> None:
    """Measure decoding against the memory's limit."""
    lm, tokenizer = load_target(config.model)
    more = {name: drafter.build(lm) for name, drafter in config.more.items()}
    result = measure(lm, tokenizer, config.drafter.build(lm), config.speed, more)
    speed_report.write(result, Path(config.output), Console())


@command(goes_on=True)
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
    log.info("%s, %s and report/ are in %s", tuning.SETTINGS, tuning.NUMBERS, config.output)
    log.info("use it: %s", use)


@command()
def chat(config: ChatCommand) -> None:
    """Talk in the terminal until end of file."""
    lm, tokenizer = load_target(config.model)
    engine = Engine(lm, config.drafter.build(lm), tokenizer, prefix_cache=True)
    console = Console()
    console.print(
        f"{config.model.name} with {config.drafter.name}; green: drafted and accepted. An empty "
        "line begins a new conversation, Ctrl-D ends.",
        style="dim",
    )
    questions = talk.questions(console)
    talk.chat(engine, tokenizer, config.sampling, config.chat, console, questions)


@command()
def serve(config: ServeCommand) -> None:
    """Answer requests until it is stopped; then finish what runs."""
    run_server(config.model, config.drafter, config)
