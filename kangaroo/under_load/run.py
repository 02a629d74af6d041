"""Measure every cell that is missing: all methods in turn at each number of users, several rounds.

A finished cell is a file of the client's, so a killed run loses the cell at hand and nothing else.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from kangaroo.drafters.base import DrafterConfig
from kangaroo.evaluation import records as store
from kangaroo.evaluation.bench import fingerprint, load_questions
from kangaroo.models.loading import ModelConfig
from kangaroo.serving.serve import check_installed
from kangaroo.under_load import client
from kangaroo.under_load.client import Measured
from kangaroo.under_load.config import Cell, LoadConfig, Method, cells
from kangaroo.under_load.servers import Servers, check_urls
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import flat, git_revision

log = logging.getLogger(__name__)

PROMPTS = "prompts.jsonl"
WARMUP = "warmup"  # a cell that is thrown away
ATTEMPTS = 3  # at a cell that the client makes too few requests for, which it does now and then


def run(
    model: ModelConfig, drafters: Mapping[str, DrafterConfig], config: LoadConfig
) -> dict[Cell, Measured]:
    """All cells, those measured before included.

    Errors: `MissingPackage`, `ConfigError`, `DataError`, `ProcessLost`; those of a server's start.
    """
    methods = methods_of(drafters, config)
    version = client.client_version()
    if drafters:
        check_installed()
    folder = Path(config.output)
    enter(folder, model, methods, config, version)
    order = list(cells(config, list(methods)))
    missing = [cell for cell in order if not cell.file(folder).is_file()]
    if missing:
        check_urls(config.urls)
        if len(missing) < len(order):
            done = len(order) - len(missing)
            log.info("%d of %d cells are in %s already", done, len(order), folder)
        with Servers(model, config.server, config.alone, folder / "servers") as servers:
            for cell in tqdm(missing, initial=len(order) - len(missing), total=len(order)):
                _measure(cell, methods[cell.method], servers, config)
    return {
        cell: client.read(cell.file(folder), config.requests, config.new_tokens) for cell in order
    }


def methods_of(drafters: Mapping[str, DrafterConfig], config: LoadConfig) -> dict[str, Method]:
    """What is measured, by name.

    Errors: `ConfigError` for a name that two have, or that names no file, or if there is nothing.
    """
    if twice := drafters.keys() & config.urls.keys():
        raise ConfigError(f"urls.{min(twice)} is drafters.{min(twice)} again; call it otherwise.")
    ours = {name: Method(name, drafter=drafter) for name, drafter in drafters.items()}
    methods = ours | {name: Method(name, url=url) for name, url in config.urls.items()}
    if not methods:
        raise ConfigError("there is nothing to measure: give drafters= or urls=.")
    for name in methods:
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ConfigError(f"'{name}' names a method; use letters, digits, '-', '_' and '.'.")
    return methods


def enter(
    folder: Path,
    model: ModelConfig,
    methods: Mapping[str, Method],
    config: LoadConfig,
    version: str,
) -> None:
    """Make the folder this run's, or go on with the run that it holds, which may get more rounds
    and numbers of users.

    Errors: `ConfigError` names the settings that differ; those of `load_questions`.
    """
    known = load_questions(config.bench)
    count, wanted = len(known), config.requests
    spread = [known[i * count // wanted if wanted <= count else i % count] for i in range(wanted)]
    settings = {
        "git_revision": git_revision(),
        client.CLIENT: version,
        "bench": config.bench.name,
        "bench.fingerprint": fingerprint(spread),
        "requests": config.requests,
        "new_tokens": config.new_tokens,
        "alone": config.alone,
        **flat({"model": asdict(model), "server": asdict(config.server)}),
        **{f"urls.{name}": url for name, url in config.urls.items()},
    }
    for name, method in methods.items():
        if method.drafter is not None:
            settings |= flat(method.drafter.settings(), f"drafters.{name}.")
    goes_on = config.resume and any((folder / "cells").glob("*.json"))
    if not goes_on:
        shutil.rmtree(folder / "cells", ignore_errors=True)
    store.enter(folder, settings, {}, goes_on)
    client.write_prompts(
        [question.turns[0] for question in spread], config.new_tokens, folder / PROMPTS
    )


def _measure(cell: Cell, method: Method, servers: Servers, config: LoadConfig) -> None:
    """One cell; a server that has just started is warmed up by as many users as there will be."""
    server, new = servers.get(method)
    folder = Path(config.output)
    prompts, file = folder / PROMPTS, cell.file(folder)

    def ask(users: int, requests: int, output: Path) -> None:
        partial = output.with_name(f"{output.stem}.{os.getpid()}.json")
        told = client.scenario(server.address, prompts, requests, users, partial)
        client.measure(told, output, server.check)

    if new:
        most = max(config.users)
        discarded = folder / f"{WARMUP}-{cell.method}.json"
        ask(most, min(2 * most, config.requests), discarded)
        discarded.unlink()
    unread = file.with_suffix(".unread")
    for left in reversed(range(ATTEMPTS)):
        ask(cell.users, config.requests, unread)
        try:  # what is no result ends the run here, not after hours; the next one measures it again
            client.read(unread, config.requests, config.new_tokens)
        except client.TooFew as error:
            if not left:
                raise
            log.warning("%s It is measured again.", error)
        else:
            break
    os.replace(unread, file)
