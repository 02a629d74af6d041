"""`prepare`: what some drafters need besides an adapter, and questions."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from kangaroo.api import load_target
from kangaroo.cli.command import command
from kangaroo.cli.schema import CalibrateCommand, DatastoreCommand, LayersCommand, SplitCommand
from kangaroo.data import splitting, store
from kangaroo.data.filters import list_reasons
from kangaroo.data.reading import Source
from kangaroo.drafters import acceptance, calibration, datastore, layer_search
from kangaroo.drafters.hybrid import HybridConfig
from kangaroo.heads import adapter_files
from kangaroo.models.loading import options_of
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import command_line
from kangaroo.utils.provenance import provenance

log = logging.getLogger(__name__)


@command()
def prepare_datastore(config: DatastoreCommand) -> None:
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
    target = options_of(lm.name, config.model.name)
    use = command_line("evaluate", **target, drafter="rest", drafter__datastore=folder)
    log.info("use them: %s", use)


@command()
def prepare_layers(config: LayersCommand) -> None:
    """Search a subset of layers on the data's end, and write it."""
    lm, tokenizer = load_target(config.model)
    config.data.make(lm, tokenizer)
    samples, _ = store.load(Path(config.data.path))
    subset = layer_search.search(lm, samples, config.search, Path(config.output))
    agreement = 100 * subset.search["agreement"]
    log.info("skipping %s agrees in %.1f%%; it is in %s", subset.skip, agreement, config.output)


@command()
def prepare_calibrate(config: CalibrateCommand) -> None:
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
    file = acceptance.write(tally.acceptance(), weights, about | provenance(), folder)
    log.info("%d rounds in %d conversations: %s", tally.rounds, len(held_out), file)


@command()
def prepare_split(config: SplitCommand) -> None:
    """Split questions into some to learn from and some to measure on."""
    unreadable = Counter[str]() if config.skip_bad else None
    parts = splitting.split(Source(config.source), config.held, config.seed, unreadable)
    parts.write(Path(config.output))
    tasks = ", ".join(f"{count} of {task}" for task, count in parts.tasks.items())
    log.info(
        f"{len(parts.training)} questions to learn from, {len(parts.held_out)} held out ({tasks}); "
        f"{parts.left_out} left out, since they share a passage with those. In {config.output}."
    )
    if unreadable:
        log.info("Left out, since they cannot be read: %s.", list_reasons(unreadable))
