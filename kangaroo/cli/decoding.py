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
from kangaroo.evaluation.speed import speed_report
from kangaroo.evaluation.speed.peak import measure_memory
from kangaroo.evaluation.speed.rivals import static_cache
from kangaroo.evaluation.speed.speed import measure
from kangaroo.evaluation.speed.speed_trials import long_prompt
from kangaroo.serving.serve import serve as run_server

log = logging.getLogger(__name__)


@command("speed")
def speed(config: SpeedCommand) -> None:
    """Measure decoding against the memory's limit."""
    lm, tokenizer = load_target(config.model)
    more = {name: drafter.build(lm) for name, drafter in config.more.items()}
    result = measure(lm, tokenizer, config.drafter.build(lm), config.speed, more)
    output, options = Path(config.output), config.speed
    speed_report.write(result, output)  # what follows may take too long, or too much memory
    if options.static:
        prompt = long_prompt(tokenizer, options.phase_context)
        result["static"] = static_cache(lm, prompt, options.context_tokens)
    if options.memory:
        prompt = long_prompt(tokenizer, max(c["context"] for c in result["contexts"]))
        memory = measure_memory(config.model, config.drafter, prompt, options.context_tokens)
        result["memory"] = memory
    speed_report.write(result, output)
    speed_report.show(result, Console())
    log.info("saved in %s", output)


@command("chat")
def chat(config: ChatCommand) -> None:
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


@command("serve")
def serve(config: ServeCommand) -> None:
    """Answer requests until it is stopped; then finish what runs."""
    run_server(config.model, config.drafter, config)
