"""`convert`: adapters from other software, for it, to the hub and from it; `prepare`: what some
drafters need besides an adapter, and questions."""

import logging
from collections import Counter
from pathlib import Path

from kangaroo.api import load_target
from kangaroo.cli import schema
from kangaroo.cli.command import command
from kangaroo.data import store
from kangaroo.data.filters import list_reasons
from kangaroo.data.reading import Source, split
from kangaroo.drafters import datastore, layer_search
from kangaroo.heads import adapter_files, export, official
from kangaroo.hub import transfer
from kangaroo.hub.transfer import PullConfig, PushConfig, measure
from kangaroo.models.loading import meta_model, options_of
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import command_line
from kangaroo.utils.provenance import provenance

log = logging.getLogger(__name__)

VLLM_THRESHOLD = 0.6  # the paper's: vLLM does not learn when a draft pays


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
    target = options_of(lm.name, config.model.name)
    use = command_line("evaluate", **target, drafter__adapter=folder)
    log.info("%s: exit layer %d of %s; measure it: %s", folder, exit_layer, lm.name, use)


@command()
def convert_export(config: schema.ExportCommand) -> None:
    """Write an adapter for other software; only a draft model needs the target's weights."""
    source, output = config.source, Path(config.output)
    if config.to is schema.Layout.draft_model:
        export.save(source, config.model, output)
        log.info("%s is a checkpoint: a draft model for vLLM, SGLang and transformers", output)
        target = options_of(config.model.path, config.model.name)
        use = command_line("evaluate", **target, drafter="draft_model", drafter__model=output)
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
    use = measure(adapter.target, adapter.architecture.drafter, folder)
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
    target = options_of(lm.name, config.model.name)
    use = command_line("evaluate", **target, drafter="rest", drafter__datastore=folder)
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
