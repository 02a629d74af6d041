"""`convert`: adapters from other software, for other software, to the hub and from it."""

from __future__ import annotations

import logging
from pathlib import Path

from kangaroo.cli.command import command
from kangaroo.cli.schema import ExportCommand, ImportCommand, Layout
from kangaroo.heads import adapter_files, export, official
from kangaroo.hub import transfer
from kangaroo.hub.card import measure
from kangaroo.hub.transfer import PullConfig, PushConfig
from kangaroo.models.loading import meta_model, options_of
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import command_line
from kangaroo.utils.provenance import provenance

log = logging.getLogger(__name__)

VLLM_THRESHOLD = 0.6  # the paper's: vLLM does not learn when a draft pays


@command()
def convert_import(config: ImportCommand) -> None:
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
def convert_export(config: ExportCommand) -> None:
    """Write an adapter for other software; only a draft model needs the target's weights."""
    source, output = config.source, Path(config.output)
    if config.to is Layout.draft_model:
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
    address = transfer.push(config)
    if address is None:
        names = ", ".join(sorted(file.name for file in Path(config.output).iterdir()))
        log.info("%s holds what would be uploaded to %s: %s", config.output, config.repo, names)
    else:
        log.info("uploaded: %s", address)


@command()
def convert_pull(config: PullConfig) -> None:
    """Fetch an adapter, check it, and say how to measure it."""
    adapter, folder = transfer.pull(config), config.output
    log.info("%s: exit layer %d of %s", folder, adapter.exit_layer, adapter.target)
    log.info("measure it: %s", measure(adapter.target, adapter.architecture.drafter, folder))
