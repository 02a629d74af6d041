"""The commands: `evaluate`, `speed`, `tune`, `chat` and `serve` run drafters; `make_data` and
`train` make adapters; `convert` exchanges them; `prepare` makes what some drafters need besides."""

import json
import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kangaroo import chat as talk
from kangaroo.api import check_adapters, drafter_names, load_target, load_target_for
from kangaroo.cli import schema
from kangaroo.cli.command import combinations, command, plain, select_tracker, sweep_folder
from kangaroo.cpu.native import torch_multiplies
from kangaroo.data import store
from kangaroo.data.filters import list_reasons
from kangaroo.data.reading import Source, split
from kangaroo.drafters import datastore, layer_search
from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.engine.engine import Engine
from kangaroo.evaluation import comparison
from kangaroo.evaluation import speed as benchmark
from kangaroo.evaluation import tune as tuning
from kangaroo.evaluation.metrics import Results, scalars
from kangaroo.evaluation.run import Evaluator, MethodSpec, check
from kangaroo.evaluation.study import report as study_report
from kangaroo.evaluation.study.study import read_study
from kangaroo.heads import adapter_files, export, published
from kangaroo.hub import transfer
from kangaroo.hub.transfer import PackConfig
from kangaroo.models.loading import ModelConfig, checkpoint_at, evaluate_command, meta_model
from kangaroo.serving.serve import serve as run_server
from kangaroo.training import backend, loop
from kangaroo.training.estimate import Devices, forecast
from kangaroo.training.loop import Trainer
from kangaroo.training.recipe import paper_exit
from kangaroo.training.targets import target_with_data
from kangaroo.utils import tracking
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import command_line
from kangaroo.utils.provenance import flatten, provenance
from kangaroo.utils.ranks import Ranks, check_alone, join
from kangaroo.utils.terminal import console
from kangaroo.utils.tracking import NoTracker

log = logging.getLogger(__name__)

RESULTS = (".json", ".jsonl", ".md", ".png")  # a run's files that a tracker keeps
VLLM_THRESHOLD = 0.6  # the paper's, since vLLM does not learn when a draft pays


@command(shared=True, resumable=True)
def evaluate(config: schema.EvaluateCommand) -> float | None:
    """Measure drafters on a bench and compare them, or report finished `results` again. Returns the
    first drafter's speedup, or its tokens/s where vanilla did not run."""
    if config.results is None:
        with join() as ranks:
            return _measure(config, ranks)
    check_alone()
    results = Path(config.results)
    if not results.is_dir():
        raise ConfigError(f"results={results} is no folder; pass the output= of a run.")
    if config.page is None:
        raise ConfigError(f"results={results} needs page=, the Markdown page that shows them.")
    if Path(config.page).suffix != ".md":
        raise ConfigError(f"page={config.page} must be a Markdown page: its name ends in .md.")
    has_comparison = (results / comparison.COMPARISON).is_file()
    publish = comparison.publish if has_comparison else study_report.publish
    publish(results, Path(config.page))
    log.info("%s shows the results of %s", config.page, results)
    return None


def _measure(config: schema.EvaluateCommand, ranks: Ranks) -> float | None:
    """Measure the drafters; only the first process prints, tracks and compares."""
    sweep = sweep_folder()
    output = Path(config.output)
    if sweep is not None and sweep.resolve() not in output.resolve().parents:
        raise ConfigError(
            f"output={output} lies outside the sweep's folder '{sweep}', where its methods are "
            "compared. Leave it out, or pass hydra.sweep.dir= instead."
        )
    logger = select_tracker(config.logger, config.model.name, ranks)
    variants = combinations(config.drafter, config.variants, "variants")
    for name in variants.keys() & config.more.keys():
        raise ConfigError(f"more.{name} is drafter={name} again.")
    more = _further(config.more)
    drafters = variants | more
    check_adapters(config.model, *variants.values(), more=more)
    # the runs of a study may differ in the settings that it compares
    check(config, config.model, drafters, output if config.study else sweep or output)
    lm, tokenizer = load_target(config.model)
    methods = [MethodSpec.of(name, x, lm, asdict(config.model)) for name, x in drafters.items()]
    # before the tracker starts a run, since this may refuse
    evaluator = Evaluator(lm, tokenizer, methods, config, model_name=config.model.name, ranks=ranks)
    if ranks.is_first and not config.resume:
        (output / tracking.ID_FILE).unlink(missing_ok=True)
    settings = plain(config) | {"provenance": provenance()}
    first_drafter = methods[0].drafter
    if isinstance(first_drafter, EarlyExit):
        settings["drafter.exit_layer"] = first_drafter.exit_layer  # an axis of a sweep's plots
    with logger.start(settings, output) as tracker:
        try:
            results = evaluator.finish(tracker.log)
        finally:  # also after an error: the comparison has to show texts that differ from vanilla's
            if ranks.is_first:
                _compare(config, sweep or output)
        if ranks.is_first:
            _track(results, config, tracker)
    overall = results[0]["overall"]
    return overall["tokens_per_second"] if overall["speedup"] is None else overall["speedup"]


def _further(more: dict[str, Any]) -> dict[str, DrafterConfig]:
    """The drafters of `more`. Errors: `ConfigError` for what is none."""
    # ~drafter@more.NAME removes a drafter, but leaves its settings in an experiment as a dict
    drafters = {name: x for name, x in more.items() if not isinstance(x, dict)}
    for name, drafter in drafters.items():
        if not isinstance(drafter, DrafterConfig):
            fix = f"Write +drafter@more.{name}={drafter}."
            raise ConfigError(f"more.{name}={drafter} is no drafter's config. {fix}")
    return drafters


def _track(results: list[Results], config: schema.EvaluateCommand, tracker: NoTracker) -> None:
    overall = {r["drafter"]: r["overall"] for r in results}
    folder = Path(config.output)
    numbers = scalars(results[0]["overall"] if len(results) == 1 else flatten(overall))
    tracker.result(numbers, sorted(folder.glob("*.png")))
    results_files = (file for file in sorted(folder.rglob("*")) if file.suffix in RESULTS)
    files = [file for file in results_files if "wandb" not in file.relative_to(folder).parts]
    name = "-".join((config.model.name, *overall, config.bench.name))
    tracker.save(folder, files, name=name, kind="evaluation", metadata=numbers)


def _compare(config: schema.EvaluateCommand, folder: Path) -> None:
    if config.study is not None:
        study = read_study(config.study, folder)
        if study is not None:
            study_report.write(study, folder)
            console().print(study_report.terminal_table(study))
            log.info("%s.md, .json and .png are in %s", config.study.name, folder)
    elif methods := comparison.compare(folder):
        comparison.write(methods, folder)
        comparison.show(methods, console())
        log.info("the comparison, as report.md, speedup.png and comparison.json, is in %s", folder)


@command()
def speed(config: schema.SpeedCommand) -> None:
    """Measure the speed of decoding against the memory's limit."""
    lm, tokenizer = load_target_for(config.model, config.drafter)
    result = benchmark.measure(lm, tokenizer, config.drafter, config.speed)
    benchmark.write(result, Path(config.output), console())


@command(resumable=True)
def tune(config: schema.TuneCommand) -> None:
    """Find the fastest drafter; write its settings and a report."""
    drafters: dict[str, DrafterConfig] = {}
    more = _further(config.more)
    tried = {config.drafter.name: config.drafter} | more
    names = {*tried, *drafter_names()}
    for name in config.search.keys() - names:
        raise ConfigError(f"search.{name} is no drafter; there are {', '.join(sorted(names))}.")
    for name, drafter in tried.items():
        variants = combinations(drafter, config.search.get(name, {}), f"search.{name}")
        drafters |= {name + x.removeprefix(drafter.name): y for x, y in variants.items()}
    lm, tokenizer = load_target_for(config.model, *drafters.values(), more=more)
    use = evaluate_command(config.model, f"--config-dir={config.output}", drafter="tuned")
    model = plain(config)["model"]
    report = tuning.tune(lm, tokenizer, drafters, config.drafter, config, model=model, use=use)
    comparison.show(report, console())
    log.info("%s, %s and report/ are in %s", tuning.SETTINGS, tuning.NUMBERS, config.output)
    log.info("use it: %s", use)


@command()
def chat(config: schema.ChatCommand) -> None:
    """Chat in the terminal until end of file."""
    lm, tokenizer = load_target_for(config.model, config.drafter)
    engine = Engine(lm, config.drafter.build(lm), tokenizer, prefix_cache=True)
    terminal = console()
    terminal.print(
        f"{config.model.name} with {config.drafter.name}; green: drafted and accepted. An empty "
        "line begins a new conversation, Ctrl-D ends.",
        style="dim",
    )
    talk.chat(engine, tokenizer, config.sampling, config.chat, terminal, talk.questions(terminal))


@command()
def serve(config: schema.ServeCommand) -> None:
    """Serve requests until the process is stopped."""
    run_server(config.model, config.drafter, config)


@command(shared=True, resumable=True)
def train(config: schema.TrainCommand) -> float | None:
    """Estimate the training, let the target write its data, and train adapters on it. Returns the
    best held-out compression rate."""
    with join() as ranks:
        logger = select_tracker(config.logger, config.model.name, ranks)
        backend.check(config.trainer, ranks)
        check_format(config.model, config.trainer.muon)
        output = Path(config.output)
        loop.check(meta_model(config.model), config.recipes, config.trainer, output)
        _log_estimate(config, ranks)
        if config.estimate:
            return None
        lm = target_with_data(config.model, config.data, config.recipes, config.trainer, ranks)
        samples, about = store.load(Path(config.data.path), lm.config.vocab_size)
        origin = {"dataset": about, "provenance": provenance()}
        # before the tracker starts a run, since this may refuse
        trainer = Trainer(
            lm, samples, config.recipes, config.trainer, output=output, data=about, ranks=ranks
        )
        with logger.start(plain(config) | origin, output) as tracker:
            folders = trainer.train(tracker)
            if not ranks.is_first:
                return None
            numbers = [_report(folder, config.model, tracker) for folder in folders]
            best = max(numbers, key=lambda x: x["compression_rate"])
            tracker.result(best, [])
            return best["compression_rate"]


@command(shared=True)
def make_data(config: schema.TrainCommand) -> None:
    """Let the target write its training data."""
    with join() as ranks:
        _log_estimate(config, ranks, trains=False)
        if not config.estimate:
            target_with_data(
                config.model, config.data, config.recipes, config.trainer, ranks, trains=False
            )


def check_format(model: ModelConfig, muon: bool = False) -> None:
    """Warn where training would be slow in the model's number format, or in Muon's bfloat16."""
    multiplied = torch.bfloat16 if muon else model.dtype.torch
    if Devices.of(model).device == "cpu" and not torch_multiplies(multiplied):
        log.warning(
            f"PyTorch is slow in {multiplied} on this processor: training takes at least five "
            "times as long as with model.dtype=float32, and ten times with trainer.muon=true. The "
            f"text can be written in bfloat16 first ({command_line('make_data')}), and the adapter "
            "serves each format."
        )


def _log_estimate(config: schema.TrainCommand, ranks: Ranks, trains: bool = True) -> None:
    """Log the time and memory that a run needs on its devices; `trains` is false where it only
    writes data. Errors: `ConfigError` where it cannot fit, or would hold out all data."""
    lm = meta_model(config.model)
    if any(x.exit_layers is None and x.architecture.fixed_exit(lm) is None for x in config.recipes):
        rule = "by the paper's rule (1/16 to 1/10 of the layers)"
        log.info("exit layer %d of %d, %s", paper_exit(lm), lm.n_layers, rule)
    lines = forecast(
        lm,
        config.recipes,
        model=config.model,
        data=config.data,
        trainer=config.trainer,
        processes=ranks.world,
        trains=trains,
    )
    for line in lines:
        log.info("%s", line)
    ranks.wait()  # a target that is loaded earlier would take memory that other processes count


def _report(folder: Path, model: ModelConfig, tracker: NoTracker) -> dict[str, float]:
    """Give a trained adapter to the tracker, and log how to measure it. Returns its metrics."""
    saved = adapter_files.read_config(str(folder))
    metadata = asdict(saved)
    # W&B takes a hundred keys; a file of the artifact has the full provenance
    progress = metadata.pop("training")["progress"]
    tracker.save(
        folder,
        sorted(folder.iterdir()),
        name=f"{model.name}-{folder.name}",
        kind="adapter",
        metadata=metadata | progress,
    )
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    use = evaluate_command(model, drafter=saved.architecture.drafter, drafter__adapter=shown)
    log.info("saved %s; measure it: %s", shown, use)
    return {"exit_layer": saved.exit_layer, "parameters": saved.parameters} | progress["held_out"]


@command()
def convert_import(config: schema.ImportCommand) -> None:
    """Convert a published checkpoint to an adapter, without the target's weights."""
    lm = meta_model(config.model)
    imported = published.read(config.source, lm, config.exit_layer)
    adapter = imported.adapter
    vocabulary_K = imported.vocabulary_K
    drafter = adapter.architecture.drafter
    ending = "" if drafter == "kangaroo" else f"-{drafter}"
    folder = Path(config.output or f"adapters/{config.model.name}{ending}")
    if (folder / adapter_files.WEIGHTS).exists():
        raise ConfigError(f"'{folder}' already holds an adapter; pass output= another folder.")
    training = {"imported": imported.origin} | provenance()
    size = None if vocabulary_K is None else len(vocabulary_K)
    about = adapter_files.describe(lm, adapter, training, vocabulary=size, facts=imported.facts)
    adapter_files.save(adapter, about, vocabulary_K, folder)
    use = evaluate_command(config.model, drafter=drafter, drafter__adapter=folder)
    what = f"{adapter.architecture.kind()}, exit layer {adapter.exit_layer} of {lm.name}"
    log.info("%s: %s; measure it: %s", folder, what, use)


@command()
def convert_export(config: schema.ExportCommand) -> None:
    """Write an adapter for other software; only a draft model needs the target's weights."""
    output = Path(config.output)
    if config.to is schema.Layout.draft_model:
        export.save(config.source, config.model, output)
        log.info("%s is a checkpoint: a draft model for vLLM, SGLang and transformers", output)
        use = evaluate_command(config.model, drafter="draft_model", drafter__model=output)
        log.info("here: %s", use)
    elif config.to is schema.Layout.speculators:
        export.write_speculators(config.source, meta_model(config.model), output)
        options = json.dumps({"model": str(output), "method": "eagle3"})
        target = checkpoint_at(config.model.path)
        log.info("for vLLM: vllm serve %s --speculative-config '%s'", target, options)
    else:
        export.write_for_vllm(config.source, meta_model(config.model), output, VLLM_THRESHOLD)
        log.info("%s is for the plugin kangaroo-vllm", output)


@command()
def convert_pack(config: PackConfig) -> None:
    """Write an adapter with its model card as a repository for the hub."""
    folder = transfer.pack(config)
    names = ", ".join(sorted(file.name for file in folder.iterdir()))
    log.info("%s holds %s; upload it: hf upload %s %s", folder, names, config.repo, folder)


@command()
def prepare_datastore(config: schema.DatastoreCommand) -> None:
    """Index a finished dataset and text files for lookups."""
    datastore.check_installed()  # before hours of writing data
    lm, tokenizer = load_target(config.model)
    if config.data is not None:
        config.data.make(lm, tokenizer)
    dataset = config.data and config.data.path
    texts, origin = store.documents(dataset, config.texts, tokenizer, lm.config.vocab_size)
    built = datastore.index(texts, lm.config.vocab_size)
    folder = datastore.save(built, lm, Path(config.output), origin | provenance())
    log.info("%(tokens)d tokens of %(documents)d documents in %(build_seconds).1f s", built.about)
    use = evaluate_command(config.model, drafter="rest", drafter__datastore=folder)
    log.info("use them: %s", use)


@command()
def prepare_layers(config: schema.LayersCommand) -> None:
    """Search the layers to skip on the end of the data, and write them."""
    lm, tokenizer = load_target(config.model)
    config.data.make(lm, tokenizer)
    samples, _ = store.load(Path(config.data.path), lm.config.vocab_size)
    subset = layer_search.search(lm, samples, config.search, Path(config.output))
    agreement = 100 * subset.search["agreement"]
    skipping = "without %s the likeliest token is the same in %.1f%% of places; written to %s"
    log.info(skipping, subset.skip, agreement, config.output)


@command()
def prepare_split(config: schema.SplitCommand) -> None:
    """Split questions into a training set and a test set."""
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
