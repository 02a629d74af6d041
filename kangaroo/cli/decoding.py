"""Commands that decode with a drafter: measure it, time it, talk to it."""

from __future__ import annotations

import itertools
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from kangaroo import tables
from kangaroo.api import load_target
from kangaroo.benchmark import speed_report
from kangaroo.benchmark.peak import measure_memory
from kangaroo.benchmark.speed import measure
from kangaroo.benchmark.speed_trials import long_prompt
from kangaroo.chat import chat as talk
from kangaroo.chat import questions as typed_questions
from kangaroo.cli.command import command, joined, plain, sweep_folder
from kangaroo.cli_schema import EvaluateCommand, SoakCommand, SpeedCommand, TalkCommand
from kangaroo.engine import Engine
from kangaroo.errors import ConfigError
from kangaroo.evaluation import comparison, report, run
from kangaroo.evaluation.bench import fingerprint, load_questions
from kangaroo.evaluation.run import Contestant
from kangaroo.provenance import provenance
from kangaroo.soak import certificate
from kangaroo.soak.run import Task
from kangaroo.soak.run import soak as soaked
from kangaroo.soak.tiny import Tiny
from kangaroo.soak.whole import Whole
from kangaroo.tracking import NoTrackerConfig, WandbConfig

log = logging.getLogger(__name__)


@command("evaluate", shared=True)
def evaluate(config: EvaluateCommand) -> None:
    """Measure a drafter on a bench; print the table and write the files. Of several drafters, in
    one run or in the jobs of a sweep, the table that compares them.
    """
    sweep = sweep_folder()
    if sweep is not None:
        _check(config, sweep)
    drafters = {config.drafter.name: config.drafter, **config.more}
    if len(drafters) == len(config.more):
        raise ConfigError(f"more.{config.drafter.name} is drafter={config.drafter.name} again.")
    with joined() as own:
        # an adapter that is not there is told before gigabytes of target are fetched
        settings = {name: drafter.settings() for name, drafter in drafters.items()}
        lm, tokenizer = load_target(config.model)
        contestants = [
            Contestant(
                name,
                drafter.build(lm),
                {"model": asdict(config.model), "drafter": settings[name]},
                drafter.made_by(),
            )
            for name, drafter in drafters.items()
        ]
        logger = config.logger if own.is_first else NoTrackerConfig()
        tracker = logger.start(plain(config) | {"provenance": provenance()}, Path(config.output))
        steps = itertools.count(1)
        try:
            results = run.evaluate(
                lm,
                tokenizer,
                contestants,
                config,
                model_name=config.model.name,
                log=lambda numbers: tracker.log(numbers, next(steps)),
                ranks=own,
            )
            if own.is_first and len(results) == 1:
                Console().print(report.terminal_table(results[0]))
                log.info("answers, summary, report and plots are in %s", config.output)
        finally:
            tracker.finish()
            # whatever became of this one; a text that is not vanilla's has to show there
            if own.is_first and (sweep is not None or config.more or config.noise_floor):
                _compare(sweep or Path(config.output))


def _check(config: EvaluateCommand, sweep: Path) -> None:
    """The jobs of a sweep lie in its folder, and in one group of W&B."""
    if sweep.resolve() not in Path(config.output).resolve().parents:
        raise ConfigError(
            f"output={config.output} lies outside the sweep's folder '{sweep}', where its "
            "methods are compared. Leave it out, or pass hydra.sweep.dir= instead."
        )
    if isinstance(config.logger, WandbConfig) and config.logger.group is None:
        config.logger.group = f"{config.model.name}-{sweep.name}"


def _compare(folder: Path) -> None:
    """Print and write the table of the methods that a run or a sweep has measured so far."""
    if found := comparison.compare(folder):
        comparison.write(found, folder)
        Console().print(comparison.terminal_table(found))
        log.info("the comparison, as report.md, speedup.png and comparison.json, is in %s", folder)


@command("speed")
def speed(config: SpeedCommand) -> None:
    """Measure decoding against the memory's limit."""
    lm, tokenizer = load_target(config.model)
    more = {name: drafter.build(lm) for name, drafter in config.more.items()}
    result = measure(lm, tokenizer, config.drafter.build(lm), config.speed, more)
    prompt = long_prompt(tokenizer, max(c["context"] for c in result["contexts"]))
    memory = measure_memory(config.model, config.drafter, prompt, config.speed.context_tokens)
    result["memory"] = memory
    speed_report.write(result, Path(config.output), Console())


@command("soak")
def soak(config: SoakCommand) -> None:
    """Compare very many tokens of every drafter with vanilla's; write the certificate."""
    options, about = config.soak, dict[str, Any]()
    tasks = [Task(Tiny(options.seed, options.device), options.tokens, lambda cell: cell.tokens)]
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
    engine = Engine(lm, config.drafter.build(lm), tokenizer)
    console = Console()
    console.print(
        f"{config.model.name} with {config.drafter.name}; green: drafted and accepted. An empty "
        "line begins a new conversation, Ctrl-D ends.",
        style="dim",
    )
    talk(engine, tokenizer, config.sampling, config.chat, console, typed_questions(console))
