"""Commands that decode with a drafter: measure it, time it, tune it, talk to it, serve it."""

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kangaroo import chat as talk
from kangaroo.api import load_target
from kangaroo.cli import schema
from kangaroo.cli.command import command, plain, sweep_folder, to_measure, tracker_of, varied
from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.evaluation import comparison
from kangaroo.evaluation import tune as tuning
from kangaroo.evaluation.metrics import scalars
from kangaroo.evaluation.race import race
from kangaroo.evaluation.run import Evaluator, MethodSpec, questions_of
from kangaroo.evaluation.speed import speed as benchmark
from kangaroo.evaluation.study import report as study_report
from kangaroo.evaluation.study.study import study_of
from kangaroo.serving.serve import serve as run_server
from kangaroo.training.results import CURVES, write_curves
from kangaroo.utils import tracking
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import flat, provenance
from kangaroo.utils.ranks import Ranks, check_alone, join
from kangaroo.utils.tracking import NoTracker

RESULTS = (".json", ".jsonl", ".md", ".png")  # files of a run that are kept with it

log = logging.getLogger(__name__)


@command(shared=True, goes_on=True)
def evaluate(config: schema.EvaluateCommand) -> float | None:
    """Measure drafters on a bench; print and write the table that compares what a run, or a sweep's
    jobs so far, have measured, or that of a study; with `results` what follows from results that
    are there. Returns the speedup of the first drafter, or tokens/s where vanilla did not run."""
    if config.results is None:
        with join() as ranks:
            return _measure(config, ranks)
    check_alone()
    results = Path(config.results)
    if not results.is_dir():
        raise ConfigError(f"results={results} is no folder; pass the output= of a run.")
    if config.page is None:  # of a training run, which may be going on
        write_curves(results)
        log.info("%s is in %s", CURVES, results)
    else:
        study_report.rewrite(Path(config.page), results)
        log.info("%s tells the results of %s", config.page, results)
    return None


def _measure(config: schema.EvaluateCommand, ranks: Ranks) -> float | None:
    """Measure the drafters; the first of the processes alone prints, tracks and compares."""
    sweep, output = sweep_folder(), Path(config.output)
    if sweep is not None and sweep.resolve() not in output.resolve().parents:
        raise ConfigError(
            f"output={output} lies outside the sweep's folder '{sweep}', where its methods are "
            "compared. Leave it out, or pass hydra.sweep.dir= instead."
        )
    logger = tracker_of(config.logger, config.model.name, ranks)
    drafters = varied(config.drafter, config.variants)
    for name in drafters.keys() & config.more.keys():
        raise ConfigError(f"more.{name} is drafter={name} again.")
    # an experiment's settings stay where ~drafter@more.NAME has left their drafter out
    drafters |= {k: more for k, more in config.more.items() if not isinstance(more, dict)}
    for drafter in drafters.values():
        drafter.settings()  # an adapter that is not there is told before gigabytes are fetched
    lm, tokenizer = load_target(config.model)
    model, name = asdict(config.model), config.model.name
    methods = [MethodSpec.of(method, each, lm, model) for method, each in drafters.items()]
    if config.race and ranks.is_first:
        (first, *_), limit = questions_of(config)
        racers = {"vanilla": Vanilla()} | {method.name: method.drafter for method in methods}
        sampling = replace(config.sampling, seed=config.seed)
        race(lm, tokenizer, racers, first.turns[0], limit, sampling, Console())
    # before a tracker has begun a run: this may refuse
    evaluator = Evaluator(lm, tokenizer, methods, config, model_name=name, ranks=ranks)
    if ranks.is_first and not config.resume:
        tracking.forget(output)
    about = plain(config) | {"provenance": provenance()}
    if isinstance(first_drafter := methods[0].drafter, EarlyExit):
        about["drafter.exit_layer"] = first_drafter.exit_layer  # an axis of a sweep's plots
    with logger.start(about, output) as tracker:
        try:
            results = evaluator.finish(tracker.log)
        finally:
            # whatever became of this one; a text that is not vanilla's has to show there
            if ranks.is_first:
                _compare(config, sweep or output)
        if ranks.is_first:
            _track(results, config, tracker)
    overall = results[0]["overall"]
    speedup: float | None = overall["speedup"]
    return overall["tokens_per_second"] if speedup is None else speedup


def _track(
    results: list[dict[str, Any]], config: schema.EvaluateCommand, tracker: NoTracker
) -> None:
    """Hand a finished run's results to the tracker."""
    overall, folder = {r["drafter"]: r["overall"] for r in results}, Path(config.output)
    numbers = scalars(results[0]["overall"] if len(results) == 1 else flat(overall))
    tracker.result(numbers, sorted(folder.glob("*.png")))
    kept = (file for file in sorted(folder.rglob("*")) if file.suffix in RESULTS)
    files = [file for file in kept if "wandb" not in file.relative_to(folder).parts]
    name = "-".join((config.model.name, *overall, config.bench.name))
    tracker.save(folder, files, name, "evaluation", numbers)


def _compare(config: schema.EvaluateCommand, folder: Path) -> None:
    """Print and write the study, or the table, of what there is."""
    if config.study is not None:
        if study := study_of(config.study, folder):
            study_report.write(study, folder)
            Console().print(study_report.terminal_table(study))
            log.info("%s.md, .json and .png are in %s", config.study.name, folder)
    elif methods := comparison.compare(folder):
        comparison.write(methods, folder)
        comparison.show(methods, Console())
        log.info("the comparison, as report.md, speedup.png and comparison.json, is in %s", folder)


@command()
def speed(config: schema.SpeedCommand) -> None:
    """Measure decoding against the memory's limit."""
    lm, tokenizer = load_target(config.model)
    more = {name: drafter.build(lm) for name, drafter in config.more.items()}
    result = benchmark.measure(lm, tokenizer, config.drafter.build(lm), config.speed, more)
    benchmark.write(result, Path(config.output), Console())


@command(goes_on=True)
def tune(config: schema.TuneCommand) -> None:
    """Search and report; write the drafter's settings."""
    drafters: dict[str, DrafterConfig] = {}
    for name, drafter in ({config.drafter.name: config.drafter} | config.more).items():
        for variant, each in varied(drafter, config.search.get(name, {})).items():
            drafters[name + variant.removeprefix(drafter.name)] = each
    lm, tokenizer = load_target(config.model)
    use = to_measure(config.model, f"--config-dir={config.output}", drafter="tuned")
    settings = {"model": plain(config)["model"], "use": use}
    report = tuning.tune(lm, tokenizer, drafters, config.drafter, config, **settings)
    comparison.show(report, Console())
    log.info("%s, %s and report/ are in %s", tuning.SETTINGS, tuning.NUMBERS, config.output)
    log.info("use it: %s", use)


@command()
def chat(config: schema.ChatCommand) -> None:
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
def serve(config: schema.ServeCommand) -> None:
    """Answer requests until it is stopped; then finish what runs."""
    run_server(config.model, config.drafter, config)
