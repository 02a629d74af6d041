"""The commands: measure, time, tune, chat and serve with a drafter; `train` an adapter, `make_data`
for it; `convert` adapters from other software, for it, to the hub and from it; `prepare` what some
drafters need besides an adapter, and questions."""

import logging
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kangaroo import chat as talk
from kangaroo.api import load_target
from kangaroo.cli import schema
from kangaroo.cli.command import command, plain, sweep_folder, tracker_of, varied
from kangaroo.cpu.native import torch_multiplies
from kangaroo.data import store
from kangaroo.data.filters import list_reasons
from kangaroo.data.reading import Source, split
from kangaroo.drafters import datastore, layer_search
from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.evaluation import comparison
from kangaroo.evaluation import speed as benchmark
from kangaroo.evaluation import tune as tuning
from kangaroo.evaluation.metrics import scalars
from kangaroo.evaluation.run import Evaluator, MethodSpec, questions_of
from kangaroo.evaluation.study import report as study_report
from kangaroo.evaluation.study.study import study_of
from kangaroo.heads import adapter_files, export, official
from kangaroo.hub import transfer
from kangaroo.hub.transfer import PullConfig, PushConfig
from kangaroo.models.loading import ModelConfig, evaluate_command, meta_model
from kangaroo.models.target import TargetModel
from kangaroo.serving.serve import serve as run_server
from kangaroo.training import backend
from kangaroo.training.estimate import Devices, foresee
from kangaroo.training.loop import Trainer
from kangaroo.training.results import CURVES, write_curves
from kangaroo.utils import tracking
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import command_line
from kangaroo.utils.provenance import flat, provenance
from kangaroo.utils.ranks import Ranks, check_alone, join
from kangaroo.utils.tracking import NoTracker

log = logging.getLogger(__name__)

RESULTS = (".json", ".jsonl", ".md", ".png")  # files of a run that are kept with it
VLLM_THRESHOLD = 0.6  # the paper's: vLLM does not learn when a draft pays
SLOW_BFLOAT16 = (
    "PyTorch multiplies bfloat16 slowly on this processor, which has no AVX-512: training takes "
    "some five times as long as with model.dtype=float32, and ten times with trainer.muon=true, "
    "whatever the format. The text can be written in bfloat16 "
    f"first ({command_line('make_data')}), and the adapter serves either format."
)


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
        talk.race(lm, tokenizer, racers, first.turns[0], limit, sampling, Console())
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
    use = evaluate_command(config.model, f"--config-dir={config.output}", drafter="tuned")
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
    talk.chat(engine, tokenizer, config.sampling, config.chat, console, talk.questions(console))


@command()
def serve(config: schema.ServeCommand) -> None:
    """Answer requests until it is stopped; then finish what runs."""
    run_server(config.model, config.drafter, config)


@command(shared=True, goes_on=True)
def train(config: schema.TrainCommand) -> float | None:
    """Say what a training takes; let the target write its data, train adapters on it, and save
    them. Returns the best held-out compression rate."""
    with join() as ranks:
        logger = tracker_of(config.logger, config.model.name, ranks)
        backend.check(config.trainer, ranks)
        check_format(config.model, config.trainer.muon)
        say_what_it_takes(config, ranks)
        if config.estimate:
            return None
        lm = _target_with_data(config, ranks)
        output, recipes = Path(config.output), [config.adapter, *config.more.values()]
        samples, about = store.load(Path(config.data.path))
        origin = {"dataset": about, "provenance": provenance()}
        # before a tracker has begun a run: this may refuse
        trainer = Trainer(lm, samples, recipes, config.trainer, output, about, ranks)
        with logger.start(plain(config) | origin, output) as tracker:
            folders = trainer.train(tracker)
            if not ranks.is_first:
                return None
            numbers = [_report(folder, config.model, tracker) for folder in folders]
            best = max(numbers, key=lambda each: each["compression_rate"])
            tracker.result(best, [folders[0].parent / CURVES])
            return best["compression_rate"]


@command(shared=True)
def make_data(config: schema.TrainCommand) -> None:
    """The first part of training alone: let the target write its data."""
    with join() as ranks:
        say_what_it_takes(config, ranks, holds_out=False)
        if not config.estimate:
            _target_with_data(config, ranks)


def check_format(model: ModelConfig, muon: bool = False) -> None:
    """Warn where training would be slow in the model's number format, or Muon in its own."""
    multiplied = torch.bfloat16 if muon else model.dtype.torch
    if Devices.of(model).place == "cpu" and not torch_multiplies(multiplied):
        log.warning("%s", SLOW_BFLOAT16)


def say_what_it_takes(config: schema.TrainCommand, ranks: Ranks, holds_out: bool = True) -> None:
    """Log what the run takes on the devices that it finds; `holds_out` is false where it only
    writes the data. Errors: `ConfigError` where it cannot fit, or would hold out all there is."""
    lm, recipes = meta_model(config.model), [config.adapter, *config.more.values()]
    parts = config.model, config.data, config.trainer, ranks.world
    for line in foresee(lm, recipes, *parts, holds_out):
        log.info("%s", line)
    ranks.wait()  # who loads its target earlier takes memory that others count


def _target_with_data(config: schema.TrainCommand, ranks: Ranks) -> TargetModel:
    """The target, once the data is there."""
    model = config.model
    if config.trainer.shard_target:  # it goes to the GPUs part by part, just before training
        model = replace(model, device="cpu", device_map=None)
    lm, tokenizer = load_target(model)
    config.data.make(lm, tokenizer, ranks)
    ranks.wait()
    about = store.about(Path(config.data.path))
    counts = (about[name] for name in ("conversations", "tokens", "assistant_tokens"))
    log.info("%d conversations, %d tokens, %d of the assistant, from %s", *counts, config.data.path)
    return lm


def _report(folder: Path, model: ModelConfig, tracker: NoTracker) -> dict[str, float]:
    """Hand a trained adapter to the tracker, and say how to measure it. Returns its numbers."""
    saved = adapter_files.read_config(str(folder))
    described = asdict(saved)
    # W&B takes a hundred keys; the file among the artifact's has the whole provenance
    progress = described.pop("training")["progress"]
    files, name = sorted(folder.iterdir()), f"{model.name}-{folder.name}"
    tracker.save(folder, files, name, "adapter", described | progress)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    use = evaluate_command(model, drafter=saved.architecture.drafter, drafter__adapter=shown)
    log.info("saved %s; measure it: %s", shown, use)
    decoded = {f"decoded/{name}": value for name, value in progress["decoded"].items()}
    facts = {"exit_layer": saved.exit_layer, "parameters": saved.parameters}
    return facts | progress["held_out"] | decoded


@command()
def convert_import(config: schema.ImportCommand) -> None:
    """Turn a checkpoint of the authors' code into an adapter, without the target's weights."""
    lm, folder = meta_model(config.model), Path(config.output)
    if (folder / adapter_files.WEIGHTS).exists():
        raise ConfigError(f"'{folder}' already holds an adapter; pass output= another folder.")
    exit_layer = official.exit_layer(config.exit_layer, lm)
    adapter, origin = official.read(config.source, lm, exit_layer)
    about = {"imported": origin} | provenance()
    adapter_files.save(adapter, adapter_files.describe(lm, adapter, about), None, folder)
    use = evaluate_command(config.model, drafter__adapter=folder)
    log.info("%s: exit layer %d of %s; measure it: %s", folder, exit_layer, lm.name, use)


@command()
def convert_export(config: schema.ExportCommand) -> None:
    """Write an adapter for other software; only a draft model needs the target's weights."""
    source, output = config.source, Path(config.output)
    if config.to is schema.Layout.draft_model:
        export.save(source, config.model, output)
        log.info("%s is a checkpoint: a draft model for vLLM, SGLang and transformers", output)
        use = evaluate_command(config.model, drafter="draft_model", drafter__model=output)
        log.info("here: %s", use)
    else:
        export.write_for_vllm(source, meta_model(config.model), output, VLLM_THRESHOLD)
        log.info("%s is for the plugin kangaroo-vllm", output)


@command()
def convert_push(config: PushConfig) -> None:
    """Upload an adapter, or show what would be."""
    if address := transfer.push(config):
        log.info("uploaded: %s", address)
    else:
        names = ", ".join(sorted(file.name for file in Path(config.output).iterdir()))
        log.info("%s holds what would be uploaded to %s: %s", config.output, config.repo, names)


@command()
def convert_pull(config: PullConfig) -> None:
    """Fetch an adapter, check it, and say how to measure it."""
    adapter, folder = transfer.pull(config), config.output
    options = {"drafter": adapter.architecture.drafter, "drafter__adapter": folder}
    use = evaluate_command(adapter.target, **options, bench="demo")
    log.info("%s: exit layer %d of %s; %s", folder, adapter.exit_layer, adapter.target, use)


@command()
def prepare_datastore(config: schema.DatastoreCommand) -> None:
    """Make a finished dataset and text files searchable."""
    datastore.check_installed()  # told before hours of writing data
    lm, tokenizer = load_target(config.model)
    if config.data is not None:
        config.data.make(lm, tokenizer)
    texts, origin = store.documents(config.data and config.data.path, config.texts, tokenizer)
    built = datastore.index(texts, lm.config.vocab_size)
    folder = datastore.save(built, lm, Path(config.output), origin | provenance())
    counts = (built.about[name] for name in ("tokens", "documents", "build_seconds"))
    log.info("%d tokens of %d documents in %.1f s", *counts)
    use = evaluate_command(config.model, drafter="rest", drafter__datastore=folder)
    log.info("use them: %s", use)


@command()
def prepare_layers(config: schema.LayersCommand) -> None:
    """Search a subset of layers on the data's end, and write it."""
    lm, tokenizer = load_target(config.model)
    config.data.make(lm, tokenizer)
    samples, _ = store.load(Path(config.data.path))
    subset = layer_search.search(lm, samples, config.search, Path(config.output))
    agreement = 100 * subset.search["agreement"]
    log.info("skipping %s agrees in %.1f%%; it is in %s", subset.skip, agreement, config.output)


@command()
def prepare_split(config: schema.SplitCommand) -> None:
    """Split questions into some to learn from and some to measure on."""
    unreadable = Counter[str]() if config.skip_bad else None
    parts = split(Source(config.source), config.held, config.seed, unreadable)
    parts.write(Path(config.output))
    held = Counter(question["category"] for question in parts.held_out)
    tasks = ", ".join(f"{count} of {task}" for task, count in held.items())
    log.info(
        f"{len(parts.training)} questions to learn from, {len(parts.held_out)} held out ({tasks}); "
        f"{parts.left_out} left out, since they share a passage with those. In {config.output}."
    )
    if unreadable:
        log.info("Left out, since they cannot be read: %s.", list_reasons(unreadable))
