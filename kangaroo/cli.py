"""The command line: alone with `cli_schema.py`, its types, it knows Hydra and OmegaConf."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import datasets
import hydra
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from rich.console import Console

from kangaroo import ranks
from kangaroo.api import load_target
from kangaroo.benchmark import cost_report, speed_report
from kangaroo.benchmark.cost import measure as measure_cost
from kangaroo.benchmark.memory import measure_memory
from kangaroo.benchmark.speed import measure
from kangaroo.benchmark.speed_trials import long_prompt
from kangaroo.blueprint import blueprint
from kangaroo.chat import chat as talk
from kangaroo.chat import questions
from kangaroo.cli_schema import (
    CompareCommand,
    CostCommand,
    DatastoreCommand,
    EstimateCommand,
    EvaluateCommand,
    ExportCommand,
    ImportAdapterCommand,
    SearchCommand,
    SpeedCommand,
    TalkCommand,
    TrainCommand,
    register,
)
from kangaroo.data import store
from kangaroo.data.documents import documents
from kangaroo.drafters import datastore as datastores
from kangaroo.drafters.layer_search import search as find_layers
from kangaroo.engine import Engine
from kangaroo.errors import ConfigError, KangarooError
from kangaroo.estimate import estimate_report
from kangaroo.estimate.devices import Devices
from kangaroo.estimate.expectation import Text, check_disk, expect
from kangaroo.estimate.fit import check_training, foresee
from kangaroo.evaluation import comparison, report
from kangaroo.evaluation.run import evaluate as run_evaluation
from kangaroo.model import LM
from kangaroo.provenance import provenance
from kangaroo.ranks import Ranks
from kangaroo.tracking import NoTrackerConfig, Tracker, WandbConfig
from kangaroo.trained import adapter_files, official
from kangaroo.training import backend
from kangaroo.training.compare import compare as compare_adapters
from kangaroo.training.compare import markdown
from kangaroo.training.loop import settled
from kangaroo.training.loop import train as train_adapters

CONFIGS = str(Path(__file__).parent.parent / "configs")

log = logging.getLogger(__name__)


register()


def command(
    config_name: str, shared: bool = False
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """A main function that takes its typed config, and says what a user can mend in one line.

    Args:
        shared: several processes can share the work; else torchrun may start but one.
    """

    def decorate(run: Callable[[Any], None]) -> Callable[[], None]:
        @hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)
        @functools.wraps(run)
        def main(config: DictConfig) -> None:
            logging.captureWarnings(True)
            transformers.utils.logging.disable_progress_bar()
            datasets.disable_progress_bars()
            failure, in_sweep = None, sweep_folder() is not None
            try:
                if not shared:
                    ranks.check_alone()
                run(OmegaConf.to_object(config))
            except Exception as error:
                mendable = isinstance(error, KangarooError | MissingMandatoryValue)
                if not (mendable or in_sweep):
                    raise
                failure = f"{type(error).__name__}: {error}"
                if in_sweep:
                    log.error("this job failed: %s", failure, exc_info=not mendable)
            # beyond the handler, whose traceback holds the target: the next job needs its memory
            gc.collect()
            if failure is not None and in_sweep:
                raise CompactHydraException(failure)  # Hydra goes on, and fails after the last job
            if failure is not None:
                raise SystemExit(failure)

        return main

    return decorate


def sweep_folder() -> Path | None:
    """The folder of the sweep (`-m`) that this job is one of; None outside a sweep."""
    known = HydraConfig.get()
    return Path(known.sweep.dir) if known.mode is RunMode.MULTIRUN else None


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process among those that torchrun started; what the log says, the first one says."""
    with ranks.join() as own:
        if not own.is_first:
            logging.disable(logging.INFO)
        yield own


@command("train", shared=True)
def train(config: TrainCommand) -> None:
    """Let the target write its data, train adapters on it, and save them."""
    with joined() as own:
        backend.check(config.trainer, own)
        lm, devices = _target_with_data(config, own)
        output, recipes = Path(config.output), [config.adapter, *config.more.values()]
        samples, about = store.load(Path(config.data.path))
        config.trainer, _ = settled(config.trainer, output, own)
        text = Text.of(samples, config.trainer.max_length)
        expected = expect(lm, recipes, config.trainer, text, own.world)
        log.info("%s", expected.summary())
        check_training(expected.memory, devices)
        logger = config.logger if own.is_first else NoTrackerConfig()
        known = {"dataset": about, "provenance": provenance()}
        tracker = logger.start(_plain(config) | known, output)
        folders = train_adapters(lm, samples, recipes, config.trainer, output, tracker, about, own)
        for folder in folders if own.is_first else ():
            _report(folder, config.model.name, tracker)
        tracker.finish()


@command("make_data", shared=True)
def make_data(config: TrainCommand) -> None:
    """The first part of training alone: let the target write its data."""
    with joined() as own:
        _target_with_data(config, own)


def _target_with_data(config: TrainCommand, own: Ranks) -> tuple[LM, Devices]:
    """The target and what it lies on, once the data is there; what that takes is said before."""
    recipes = [config.adapter, *config.more.values()]
    devices, expected, lines = foresee(
        blueprint(config.model), recipes, config.model, config.data, config.trainer, own.world
    )
    for line in lines:
        log.info("%s", line)
    if own.is_first:
        check_disk(expected, Path(config.output))
    own.wait()  # who loads its target earlier takes memory that others count
    # a sharded target goes to the GPUs part by part, just before training
    whole = not config.trainer.shard_target
    lm, tokenizer = load_target(
        config.model if whole else replace(config.model, device="cpu", device_map=None)
    )
    config.data.make(lm, tokenizer, own)
    own.wait()
    about = store.about(Path(config.data.path))
    log.info(
        "%d conversations, %d tokens, %d of the assistant, from %s",
        about["conversations"], about["tokens"], about["assistant_tokens"], config.data.path,
    )  # fmt: skip
    return lm, devices


def _report(folder: Path, model_name: str, tracker: Tracker) -> None:
    """Hand a trained adapter to the tracker, and say how to measure it."""
    saved = adapter_files.read_config(str(folder))
    described = asdict(saved)
    # W&B takes a hundred keys; the file among the artifact's has the whole provenance
    figures = described.pop("training")["progress"]
    tracker.save(folder, f"{model_name}-{folder.name}", "adapter", described | figures)
    is_medusa = saved.architecture.medusa_heads
    option = "drafter=medusa 'drafter.heads" if is_medusa else "'drafter.adapter"
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    log.info('saved %s; measure it: python evaluate.py %s="%s"\'', folder, option, folder)


@command("estimate")
def estimate(config: EstimateCommand) -> None:
    """Say what a training takes, without its weights or its data."""
    assumed, trainer, dtype = config.estimate, config.trainer, config.model.dtype.torch
    text = assumed.text(config.data, trainer)
    recipes = [config.adapter, *config.more.values()]
    expected = expect(blueprint(config.model), recipes, trainer, text, assumed.devices(trainer))
    Console().print(estimate_report.terminal(expected, assumed, trainer, text, dtype))
    if assumed.table is not None:
        row = estimate_report.row(expected, assumed, trainer, config.model.name, dtype)
        estimate_report.append(row, Path(assumed.table))


@command("cost")
def cost(config: CostCommand) -> None:
    """Measure training, part by part, against the frozen forward alone."""
    lm, _ = load_target(config.model)
    result = measure_cost(lm, config.model, config.cost, config.trainer)
    cost_report.write(result, Path(config.output), Console())


@command("evaluate", shared=True)
def evaluate(config: EvaluateCommand) -> None:
    """Measure a drafter on a bench; print the table and write the artefacts. In a sweep, the same
    of all its methods.
    """
    sweep = sweep_folder()
    if sweep is not None:
        if sweep.resolve() not in Path(config.output).resolve().parents:
            raise ConfigError(
                f"output={config.output} lies outside the sweep's folder '{sweep}', where its "
                "methods are compared. Leave it out, or pass hydra.sweep.dir= instead."
            )
        if isinstance(config.logger, WandbConfig) and config.logger.group is None:
            config.logger.group = f"{config.model.name}-{sweep.name}"
    with joined() as own:
        # an adapter that is not there is told before gigabytes of target are fetched
        settings = {"model": asdict(config.model), "drafter": config.drafter.settings()}
        lm, tokenizer = load_target(config.model)
        drafter = config.drafter.build(lm)
        logger = config.logger if own.is_first else NoTrackerConfig()
        known = {"provenance": provenance()}
        tracker = logger.start(_plain(config) | known, Path(config.output))
        steps = itertools.count(1)
        try:
            result = run_evaluation(
                lm,
                tokenizer,
                drafter,
                config,
                model_name=config.model.name,
                drafter_name=config.drafter.name,
                settings=settings,
                made_by=config.drafter.made_by(),
                log=lambda figures: tracker.log(figures, next(steps)),
                ranks=own,
            )
            if own.is_first:
                Console().print(report.terminal_table(result))
                log.info("answers, summary, report and plots are in %s", config.output)
        finally:
            tracker.finish()
            # whatever became of this one; a text that is not vanilla's has to show there
            if own.is_first and sweep is not None and (found := comparison.compare(sweep)):
                comparison.write(found, sweep)
                Console().print(comparison.terminal_table(found))
                log.info("the comparison, as report.md and comparison.json, is in %s", sweep)


@command("speed")
def speed(config: SpeedCommand) -> None:
    """Measure decoding against the memory's limit."""
    lm, tokenizer = load_target(config.model)
    result = measure(lm, tokenizer, config.drafter.build(lm), config.speed)
    prompt = long_prompt(tokenizer, max(c["context"] for c in result["contexts"]))
    memory = measure_memory(config.model, config.drafter, prompt, config.speed.context_tokens)
    result["memory"] = memory
    speed_report.write(result, Path(config.output), Console())


@command("compare")
def compare(config: CompareCommand) -> None:
    """Measure finished adapters on the data's held-out part; write the table."""
    lm, tokenizer = load_target(config.model)
    config.data.make(lm, tokenizer)
    samples, about = store.load(Path(config.data.path))
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)  # before the work, whose figures go there
    rows = compare_adapters(lm, samples, config.compare)
    table = markdown(rows)
    facts = {"rows": rows, "settings": asdict(config.compare), "data": about} | provenance()
    (output / "compare.json").write_text(json.dumps(facts, indent=2) + "\n")
    (output / "compare.md").write_text(table)
    log.info("compare.md and compare.json are in %s\n%s", output, table)


@command("search_layers")
def search_layers(config: SearchCommand) -> None:
    """Search a subset of layers on the data's end, and write it."""
    lm, tokenizer = load_target(config.model)
    config.data.make(lm, tokenizer)
    samples, _ = store.load(Path(config.data.path))
    found = find_layers(lm, samples, config.search, Path(config.output))
    log.info(
        "skipping %s agrees in %.1f%%; it is in %s", found.skip, 100 * found.search["agreement"],
        config.output,
    )  # fmt: skip


@command("datastore")
def datastore(config: DatastoreCommand) -> None:
    """Make a finished dataset and text files searchable."""
    lm, tokenizer = load_target(config.model)
    if config.data is not None:
        config.data.make(lm, tokenizer)
    found, origin = documents(config.data and config.data.path, config.texts, tokenizer)
    made = datastores.index(found, lm.config.vocab_size)
    folder = datastores.save(made, lm, Path(config.output), origin | provenance())
    log.info(
        "%d tokens of %d documents in %.1f s; use them: python evaluate.py drafter=rest "
        "'drafter.datastore=\"%s\"'",
        made.about["tokens"], made.about["documents"], made.about["build_seconds"], folder,
    )  # fmt: skip


@command("import_adapter")
def import_adapter(config: ImportAdapterCommand) -> None:
    """Turn a checkpoint of the authors' code into an adapter, without the target's weights."""
    lm, folder = blueprint(config.model), Path(config.output)
    if (folder / adapter_files.WEIGHTS).exists():
        raise ConfigError(f"'{folder}' already holds an adapter; pass output= another folder.")
    exit_layer = official.exit_layer(config.exit_layer, lm)
    checkpoint = official.read(config.source)
    adapter = official.to_adapter(checkpoint, lm, exit_layer)
    told = {"imported": checkpoint.origin} | provenance()
    adapter_files.save(adapter, adapter_files.describe(lm, adapter, told), None, folder)
    log.info(
        "%s: exit layer %d of %s; measure it: python evaluate.py model=%s 'drafter.adapter=\"%s\"'",
        folder, exit_layer, lm.name, config.model.name, folder,
    )  # fmt: skip


@command("export")
def export(config: ExportCommand) -> None:
    """Write an adapter for other software, without the target's weights."""
    adapter = official.write(config.source, blueprint(config.model), Path(config.output))
    log.info(
        "%s is for the authors' code: --adapter-path %s --exitlayer %d",
        config.output, config.output, adapter.exit_layer,
    )  # fmt: skip


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


def _plain(config: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
