"""Commands that decode with a drafter: time it, tune it, talk to it, serve it."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from kangaroo import chat as talk
from kangaroo.api import load_target
from kangaroo.cli.command import command, plain
from kangaroo.cli.schema import ChatCommand, ServeCommand, SpeedCommand, TuneCommand
from kangaroo.engine.engine import Engine
from kangaroo.evaluation import comparison
from kangaroo.evaluation.speed import report
from kangaroo.evaluation.speed.speed import measure
from kangaroo.evaluation.tune import page, search
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
    report.write(result, Path(config.output), Console())


@command(goes_on=True)
def tune(config: TuneCommand) -> None:
    """Search, confirm and report; write the drafter's settings."""
    lm, tokenizer = load_target(config.model)
    model, name = plain(config)["model"], config.model.name
    tuned = search.tune(lm, tokenizer, config.drafter, config, model=model)
    dtype = str(lm.dtype).removeprefix("torch.")
    target = options_of(config.model.path, name)
    use = command_line("evaluate", f"--config-dir={config.output}", **target, drafter="tuned")
    about = f"{name} on {config.bench.name}, {dtype}, {lm.device.type}"
    page.write(tuned, config, about, use)
    comparison.show(tuned.report, Console())
    log.info("%s and %s are in %s", page.PAGE, page.SETTINGS, Path(config.output))
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
