"""Commands that decode with a drafter: measure it, time it, talk to it."""

from __future__ import annotations

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
from kangaroo.cli.command import command, in_group, joined, plain, sweep_folder
from kangaroo.cli_schema import EvaluateCommand, SoakCommand, SpeedCommand, TalkCommand
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.engine import Engine
from kangaroo.errors import ConfigError
from kangaroo.evaluation import comparison, report, run
from kangaroo.evaluation.bench import fingerprint, load_questions
from kangaroo.evaluation.metrics import scalars
from kangaroo.evaluation.run import Contestant
from kangaroo.provenance import flat, provenance
from kangaroo.soak import certificate
from kangaroo.soak.run import Task
from kangaroo.soak.run import soak as soaked
from kangaroo.soak.tiny import Tiny
from kangaroo.soak.whole import Whole
from kangaroo.tracking import NoTrackerConfig, Row, Tracker, finished

# files of a run that are kept with it
RESULTS = (".json", ".jsonl", ".md", ".png")

log = logging.getLogger(__name__)


@command("evaluate", shared=True)
def evaluate(config: EvaluateCommand) -> float | None:
    """Measure a drafter on a bench; print the table and write the files. Of several drafters, in
    one run or in the jobs of a sweep, the table that compares them. Returns the speedup of the
    drafter, or tokens/s where vanilla did not run.
    """
    sweep = sweep_folder()
    if sweep is not None:
        _check(config, sweep)
    in_group(config.logger, config.model.name)
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
        with finished(logger.start(_known(config, contestants[0]), Path(config.output))) as tracker:
            try:
                results = run.evaluate(
                    lm,
                    tokenizer,
                    contestants,
                    config,
                    model_name=config.model.name,
                    log=lambda numbers: tracker.log(numbers, _answered(numbers)),
                    ranks=own,
                )
                if own.is_first and len(results) == 1:
                    Console().print(report.terminal_table(results[0]))
                    log.info("answers, summary, report and plots are in %s", config.output)
            finally:
                # whatever became of this one; a text that is not vanilla's has to show there
                if own.is_first and (sweep is not None or config.more or config.noise_floor):
                    _compare(sweep or Path(config.output))
            if own.is_first:
                _tell(results, config, tracker)
        overall = results[0]["overall"]
        speedup: float | None = overall["speedup"]
        return overall["tokens_per_second"] if speedup is None else speedup


def _known(config: EvaluateCommand, first: Contestant) -> dict[str, Any]:
    """What a tracker is told of a run before it begins. An adapter knows its exit layer, which is
    an axis of a sweep's plots.
    """
    known = plain(config) | {"provenance": provenance()}
    if isinstance(first.drafter, EarlyExit):
        known["drafter.exit_layer"] = first.drafter.exit_layer
    return known


def _answered(numbers: dict[str, float]) -> int:
    """How many questions metrics are of, which is also a run's step; of several contestants the
    names of metrics begin with theirs.
    """
    return int(next(n for name, n in numbers.items() if name.split(".")[-1] == "questions"))


def _tell(results: list[dict[str, Any]], config: EvaluateCommand, tracker: Tracker) -> None:
    """Hand a finished run's results to the tracker."""

    def row(heading: str, name: str, found: dict[str, Any]) -> Row:
        return {heading: name, **scalars(found)}

    folder, overall = Path(config.output), {one["drafter"]: one["overall"] for one in results}
    if len(results) == 1:
        numbers, groups = scalars(results[0]["overall"]), report.groups(results[0])
        tables = {"tasks": [row("task", *group) for group in groups]}
    else:
        numbers = scalars(flat(overall))
        tables = {"methods": [row("method", *one) for one in overall.items()]}
    tracker.result(numbers, tables, {file.stem: file for file in sorted(folder.glob("*.png"))})
    own = (file for file in sorted(folder.rglob("*")) if file.suffix in RESULTS)
    files = [file for file in own if "wandb" not in file.relative_to(folder).parts]
    name = "-".join((config.model.name, *overall, config.bench.name))
    tracker.save(folder, files, name, "evaluation", numbers)


def _check(config: EvaluateCommand, sweep: Path) -> None:
    """The jobs of a sweep lie in its folder."""
    if sweep.resolve() not in Path(config.output).resolve().parents:
        raise ConfigError(
            f"output={config.output} lies outside the sweep's folder '{sweep}', where its "
            "methods are compared. Leave it out, or pass hydra.sweep.dir= instead."
        )


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
