"""Commands about what drafters use: search, index, import, export,
push to the hub and pull from it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from kangaroo.api import load_target
from kangaroo.cli.command import command
from kangaroo.cli.schema import (
    CalibrateCommand,
    DatastoreCommand,
    ExportCommand,
    ImportAdapterCommand,
    Layout,
    PullCommand,
    PushCommand,
    SearchCommand,
)
from kangaroo.data import splitting, store
from kangaroo.data.documents import documents
from kangaroo.data.filters import list_reasons
from kangaroo.data.reading import Source
from kangaroo.drafters import calibration, layer_search, odds
from kangaroo.drafters import datastore as datastores
from kangaroo.drafters.hybrid import HybridConfig
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.heads import adapter_files, for_vllm, official
from kangaroo.heads import export as export_model
from kangaroo.hub import transfer
from kangaroo.hub.card import measure
from kangaroo.models.loading import options_of
from kangaroo.models.meta_model import blueprint
from kangaroo.utils.errors import ConfigError, KangarooError
from kangaroo.utils.folders import command_line
from kangaroo.utils.provenance import provenance

log = logging.getLogger(__name__)


@command("search_layers", keeps=True)
def search_layers(config: SearchCommand) -> None:
    """Search a subset of layers on the data's end, and write it."""
    lm, tokenizer = load_target(config.model)
    config.data.make(lm, tokenizer)
    samples, _ = store.load(Path(config.data.path))
    found = layer_search.search(lm, samples, config.search, Path(config.output))
    agreement = found.search["agreement"]
    log.info(
        "skipping %s agrees in %.1f%%; it is in %s", found.skip, 100 * agreement, config.output
    )


@command("calibrate")
def calibrate(config: CalibrateCommand) -> None:
    """Count on the data's held-out part, and write the result beside the adapter."""
    drafter = config.drafter
    if not isinstance(drafter, HybridConfig):
        raise ConfigError(
            f"drafter={drafter.name} has nothing to calibrate; pass drafter=hybrid and "
            "drafter.adapter= the adapter to count for."
        )
    lm, tokenizer = load_target(config.model)
    layer, heads = drafter.load(lm)
    folder = adapter_files.find(drafter.adapter)
    config.data.make(lm, tokenizer)
    samples, data = store.load(Path(config.data.path))
    held_out = samples[-config.calibrate.holdout :]
    most = config.calibrate.max_length
    tally = calibration.count(lm, layer, heads[0], held_out, drafter.steps, most)
    about = {"rounds": tally.rounds, "settings": asdict(config.calibrate), "data": data}
    weights = adapter_files.weights_hash(drafter.adapter)
    file = odds.write(tally.odds(), weights, about | provenance(), folder)
    log.info("%d rounds in %d conversations: %s", tally.rounds, len(held_out), file)


@command("datastore")
def datastore(config: DatastoreCommand) -> None:
    """Make a finished dataset and text files searchable."""
    datastores.check_installed()  # told before hours of writing data
    lm, tokenizer = load_target(config.model)
    if config.data is not None:
        config.data.make(lm, tokenizer)
    found, origin = documents(config.data and config.data.path, config.texts, tokenizer)
    made = datastores.index(found, lm.config.vocab_size)
    folder = datastores.save(made, lm, Path(config.output), origin | provenance())
    counts = made.about["tokens"], made.about["documents"], made.about["build_seconds"]
    log.info("%d tokens of %d documents in %.1f s", *counts)
    target = options_of(lm.name, config.model.name)
    use = command_line("evaluate", **target, drafter="rest", drafter__datastore=folder)
    log.info("use them: %s", use)


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
    target = options_of(lm.name, config.model.name)
    use = command_line("evaluate", **target, drafter__adapter=folder)
    log.info("%s: exit layer %d of %s; measure it: %s", folder, exit_layer, lm.name, use)


@command("export")
def export(config: ExportCommand) -> None:
    """Write an adapter for other software; only a draft model needs the target's weights."""
    source, output = config.source, Path(config.output)
    if config.to is Layout.draft_model:
        export_model.save(source, config.model, output)
        log.info("%s is a checkpoint: a draft model for vLLM, SGLang and transformers", output)
        target = options_of(config.model.path, config.model.name)
        use = command_line("evaluate", **target, drafter="draft_model", drafter__model=output)
        log.info("here: %s", use)
    elif config.to is Layout.vllm:
        threshold = KangarooConfig().threshold
        for_vllm.write(source, blueprint(config.model), output, threshold)
        log.info("%s is for the plugin kangaroo-vllm", output)
    else:
        adapter = official.write(source, blueprint(config.model), output)
        options = f"--adapter-path {output} --exitlayer {adapter.exit_layer}"
        log.info("%s is for the authors' code: %s", output, options)


@command("push")
def push(config: PushCommand) -> None:
    """Upload an adapter, or show what would be."""
    address = transfer.push(config)
    if address is None:
        names = ", ".join(sorted(file.name for file in Path(config.output).iterdir()))
        log.info("%s holds what would be uploaded to %s: %s", config.output, config.repo, names)
    else:
        log.info("uploaded: %s", address)


@command("pull")
def pull(config: PullCommand) -> None:
    """Fetch an adapter, check it, and say how to measure it."""
    found, folder = transfer.pull(config), config.output
    log.info("%s: exit layer %d of %s", folder, found.exit_layer, found.target)
    log.info("measure it: %s", measure(found.target, found.architecture.drafter, folder))


def split() -> None:
    """Split questions into some to learn from and some to measure on (docs/data.md)."""
    parser = argparse.ArgumentParser(description=split.__doc__)
    parser.add_argument("source", help="questions, in any form that data.source= takes")
    parser.add_argument(
        "output", type=Path, help=f"a folder for {splitting.TRAINING} and {splitting.HELD_OUT}"
    )
    parser.add_argument(
        "--held",
        type=int,
        default=64,
        help="questions to hold out of each task (64 if nothing is said)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the choice and of the order")
    parser.add_argument("--skip-bad", action="store_true", help="leave out what cannot be read")
    asked = parser.parse_args()
    unreadable = Counter[str]() if asked.skip_bad else None
    try:
        made = splitting.split(Source(asked.source), asked.held, asked.seed, unreadable)
        made.write(asked.output)
    except (KangarooError, OSError) as error:
        parser.error(str(error))
    tasks = ", ".join(f"{count} of {task}" for task, count in made.tasks.items())
    sys.stdout.write(
        f"{len(made.training)} questions to learn from, {len(made.held_out)} held out ({tasks}); "
        f"{made.left_out} left out, since they share a passage with those. In {asked.output}.\n"
    )
    if unreadable:
        sys.stdout.write(f"Left out, since they cannot be read: {list_reasons(unreadable)}.\n")
