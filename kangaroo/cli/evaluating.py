"""The command that measures drafters."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from kangaroo.api import load_target
from kangaroo.cli.command import command, in_group, joined, plain, sweep_folder, varied
from kangaroo.cli.schema import EvaluateCommand
from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.evaluation import comparison, report, run
from kangaroo.evaluation.config import asked
from kangaroo.evaluation.metrics import scalars
from kangaroo.evaluation.race import race
from kangaroo.evaluation.run import Contestant
from kangaroo.evaluation.study import report as study_report
from kangaroo.evaluation.study.results import study_of
from kangaroo.models.target import LM
from kangaroo.utils import tracking
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import flat, provenance
from kangaroo.utils.tracking import NoTrackerConfig, Row, Tracker, finished

# files of a run that are kept with it
RESULTS = (".json", ".jsonl", ".md", ".png")

log = logging.getLogger(__name__)


@command("evaluate", shared=True, goes_on=True)
def evaluate(config: EvaluateCommand) -> float | None:
    """Measure a drafter on a bench; print the table and write the files. Of several drafters, in
    one run or in the jobs of a sweep, the table that compares them, or that of a study. Returns
    the speedup of the drafter, or tokens/s where vanilla did not run.
    """
    sweep = sweep_folder()
    if sweep is not None:
        _check(config, sweep)
    in_group(config.logger, config.model.name)
    drafters = _drafters(config)
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
        if config.race and own.is_first:
            _race(config, contestants, lm, tokenizer)
        logger = config.logger if own.is_first else NoTrackerConfig()
        # before a tracker has begun a run: this may refuse
        begun = run.begin(
            lm, tokenizer, contestants, config, model_name=config.model.name, ranks=own
        )
        if own.is_first and not config.resume:
            tracking.forget(Path(config.output))
        with finished(logger.start(_known(config, contestants[0]), Path(config.output))) as tracker:
            try:
                results = run.finish(
                    begun, log=lambda numbers: tracker.log(numbers, _answered(numbers))
                )
                if own.is_first and len(results) == 1:
                    Console().print(report.terminal_table(results[0]))
                    log.info("answers, summary, report and plots are in %s", config.output)
            finally:
                # whatever became of this one; a text that is not vanilla's has to show there
                several = sweep is not None or len(drafters) > 1 or config.noise_floor
                if own.is_first and (several or config.study is not None):
                    _together(config, sweep or Path(config.output))
            if own.is_first:
                _tell(results, config, tracker)
        overall = results[0]["overall"]
        speedup: float | None = overall["speedup"]
        return overall["tokens_per_second"] if speedup is None else speedup


def _drafters(config: EvaluateCommand) -> dict[str, DrafterConfig]:
    """What is measured, by name."""
    drafters = varied(config.drafter, config.variants)
    for name in drafters.keys() & config.more.keys():
        raise ConfigError(f"more.{name} is drafter={name} again.")
    # an experiment's settings stay where ~drafter@more.NAME has left their drafter out
    return drafters | {k: one for k, one in config.more.items() if not isinstance(one, dict)}


def _race(
    config: EvaluateCommand,
    contestants: list[Contestant],
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Show the first turn of the first question by vanilla decoding and all contestants."""
    questions, limit = asked(config)
    drafters = {"vanilla": Vanilla()} | {one.name: one.drafter for one in contestants}
    sampling = replace(config.sampling, seed=config.seed)
    race(lm, tokenizer, drafters, questions[0].turns[0], limit, sampling, Console())


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


def _together(config: EvaluateCommand, folder: Path) -> None:
    """Print and write the study, or the table, of what a run or a sweep has measured so far."""
    if config.study is not None:
        if study := study_of(config.study, folder):
            study_report.write(study, folder)
            Console().print(study_report.terminal_table(study))
            log.info("%s.md, .json and .png are in %s", config.study.name, folder)
    elif found := comparison.compare(folder):
        comparison.write(found, folder)
        comparison.show(found, Console())
        log.info("the comparison, as report.md, speedup.png and comparison.json, is in %s", folder)
