"""Commands that decode with a drafter: time it, talk to it, serve it."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console

from kangaroo.api import load_target
from kangaroo.chat import chat as talk
from kangaroo.chat import questions as typed_questions
from kangaroo.cli.command import command
from kangaroo.cli.schema import ChatCommand, ServeCommand, SpeedCommand
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.speed import report
from kangaroo.evaluation.speed.speed import measure
from kangaroo.serving.serve import serve as run_server

log = logging.getLogger(__name__)


@command("speed")
def speed(config: SpeedCommand) -> None:
    """Measure decoding against the memory's limit."""
    lm, tokenizer = load_target(config.model)
    more = {name: drafter.build(lm) for name, drafter in config.more.items()}
    result = measure(lm, tokenizer, config.drafter.build(lm), config.speed, more)
    report.write(result, Path(config.output), Console())


@command("chat")
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
    talk(engine, tokenizer, config.sampling, config.chat, console, typed_questions(console))


@command("serve")
def serve(config: ServeCommand) -> None:
    """Answer requests until it is stopped; then finish what runs."""
    run_server(config.model, config.drafter, config)
