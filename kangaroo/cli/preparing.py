"""`prepare`: what some drafters need besides an adapter, and questions."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from kangaroo.api import load_target
from kangaroo.cli.command import command
from kangaroo.cli.schema import DatastoreCommand, LayersCommand, SplitCommand
from kangaroo.data import store
from kangaroo.data.filters import list_reasons
from kangaroo.data.reading import Source, split
from kangaroo.drafters import datastore, layer_search
from kangaroo.models.loading import options_of
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
def prepare_split(config: SplitCommand) -> None:
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
