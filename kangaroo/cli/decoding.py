"""Commands that decode with a drafter: time it, try it hard, talk to it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rich.console import Console

from kangaroo.api import load_target
from kangaroo.chat import chat as talk
from kangaroo.chat import questions as typed_questions
from kangaroo.cli.command import command, plain
from kangaroo.cli.schema import SoakCommand, SpeedCommand, TalkCommand
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.bench import fingerprint, load_questions
from kangaroo.evaluation.speed import report
from kangaroo.evaluation.speed.speed import measure
from kangaroo.soak import certificate
from kangaroo.soak.run import Task
from kangaroo.soak.run import soak as soaked
from kangaroo.soak.tiny import Tiny
from kangaroo.soak.whole import Whole
from kangaroo.utils import tables

log = logging.getLogger(__name__)


@command("speed")
def speed(config: SpeedCommand) -> None:
    """Measure decoding against the memory's limit."""
    lm, tokenizer = load_target(config.model)
    more = {name: drafter.build(lm) for name, drafter in config.more.items()}
    result = measure(lm, tokenizer, config.drafter.build(lm), config.speed, more)
    report.write(result, Path(config.output), Console())


@command("soak", goes_on=True)
def soak(config: SoakCommand) -> None:
    """Compare very many tokens of every drafter with vanilla's; write the certificate."""
    options, about = config.soak, dict[str, Any]()
    tiny = Tiny(options.seed, options.device, options.dtype.torch)
    tasks = [Task(tiny, options.tokens, lambda cell: cell.tokens)]
    if options.minutes:
        settings = {name: drafter.settings() for name, drafter in config.drafters.items()}
        questions = load_questions(config.bench)
        about = {"model": plain(config.model), "drafters": settings, "bench": config.bench.name}
        lm, tokenizer = load_target(config.model)
        built = {name: drafter.build(lm) for name, drafter in config.drafters.items()}
        whole = Whole(config.model.name, lm, tokenizer, built, questions, options.seed)
        tasks.append(Task(whole, 60 * options.minutes, lambda cell: cell.seconds))
        about |= {"bench.fingerprint": fingerprint(questions)}
    found = soaked(tasks, options, about, Path(config.output))
    console = Console()
    for name, groups in found["by"].items():
        console.print(tables.terminal(certificate.rows(name, groups)))
    console.print(certificate.verdict(found), highlight=False)
    log.info("the certificate, as certificate.md and certificate.json, is in %s", config.output)


@command("chat")
def chat(config: TalkCommand) -> None:
    """Talk in the terminal until end of file."""
    lm, tokenizer = load_target(config.model)
    engine = Engine(lm, config.drafter.build(lm), tokenizer, reuse=True)
    console = Console()
    console.print(
        f"{config.model.name} with {config.drafter.name}; green: drafted and accepted. An empty "
        "line begins a new conversation, Ctrl-D ends.",
        style="dim",
    )
    talk(engine, tokenizer, config.sampling, config.chat, console, typed_questions(console))
