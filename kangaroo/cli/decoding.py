"""Commands that decode with a drafter: measure it, time it, talk to it."""

from __future__ import annotations

import itertools
import logging
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from kangaroo.api import load_target
from kangaroo.benchmark import speed_report
from kangaroo.benchmark.peak import measure_memory
from kangaroo.benchmark.speed import measure
from kangaroo.benchmark.speed_trials import long_prompt
from kangaroo.chat import chat as talk
from kangaroo.chat import questions
from kangaroo.cli.command import command, joined, plain, sweep_folder, varied
from kangaroo.cli_schema import EvaluateCommand, SpeedCommand, TalkCommand
from kangaroo.engine import Engine
from kangaroo.errors import ConfigError
from kangaroo.evaluation import comparison, report, run
from kangaroo.evaluation.run import Contestant
from kangaroo.paper import report as study_report
from kangaroo.paper.results import study_of
from kangaroo.paper.study import StudyConfig
from kangaroo.provenance import provenance
from kangaroo.tracking import NoTrackerConfig, WandbConfig

log = logging.getLogger(__name__)


@command("evaluate", shared=True)
def evaluate(config: EvaluateCommand) -> None:
    """Measure a drafter on a bench; print the table and write the files. Of several drafters, in
    one run or in the jobs of a sweep, the table that compares them, or that of a study.
    """
    sweep = sweep_folder()
    if sweep is not None:
        _check(config, sweep)
    drafters = varied(config.drafter, config.variants)
    for name in drafters.keys() & config.more.keys():
        raise ConfigError(f"more.{name} is drafter={name} again.")
    # an experiment's settings stay where ~drafter@more.NAME has left their drafter out
    drafters |= {name: one for name, one in config.more.items() if not isinstance(one, dict)}
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
            if own.is_first and config.study is not None:
                _study(config.study, sweep or Path(config.output))
            elif own.is_first and (sweep is not None or len(drafters) > 1):
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


def _study(config: StudyConfig, folder: Path) -> None:
    """Print and write the study of what a run or a sweep has measured so far."""
    if found := study_of(config, folder):
        study_report.write(found, folder)
        Console().print(study_report.terminal_table(found))
        log.info("%s.md, .json and .png are in %s", config.name, folder)


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
    talk(engine, tokenizer, config.sampling, config.chat, console, questions(console))
