"""Adapters to the hub and from it: whole, checked, and never over something that is there."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # a connection that fails, as the hub's client raises it
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from kangaroo.heads import adapter_files
from kangaroo.heads.adapter_files import CONFIG, VOCABULARY, WEIGHTS, AdapterConfig
from kangaroo.hub.card import card
from kangaroo.utils.errors import AdapterNotFound, ConfigError, CorruptFile, HubError
from kangaroo.utils.folders import new_folder, of_project

CARD, SUMS, ORIGIN = "README.md", "SHA256SUMS", "hub.json"
# what is sent of an adapter's folder, and fetched: the first two it must have
FILES = (WEIGHTS, CONFIG, VOCABULARY)
# what transformers' `generate(custom_generate=...)` looks for, taken from integrations/transformers
CODE, CODE_FILES = "custom_generate", ("generate.py", "requirements.txt")

log = logging.getLogger(__name__)


@dataclass
class PushConfig:
    """An adapter for the hub.

    Args:
        source: the adapter's folder. (`adapter=` is the group of train.py.)
        repo: the repository on the hub, USER/NAME; it is made if there is none.
        output: the folder that holds exactly what is uploaded.
        revision: branch to commit to; None is the repository's main one.
        private: of a repository that is made.
        dry_run: write the folder, and upload nothing.
        base_model: hub id of the target, where the adapter's config does not say it.
        license: of the adapter, an identifier of the hub's such as apache-2.0; None states none.
        message: of the commit.
    """

    source: str
    repo: str
    output: str
    revision: str | None = None
    private: bool = False
    dry_run: bool = False
    base_model: str | None = None
    license: str | None = None
    message: str = "Upload an adapter with Kangaroo"


@dataclass
class PullConfig:
    """An adapter from the hub.

    Args:
        repo: the repository, USER/NAME.
        output: the adapter's folder, which must not be there yet.
        revision: branch, tag or commit; None is the repository's main branch.
    """

    repo: str
    output: str
    revision: str | None = None


def check(folder: Path) -> AdapterConfig:
    """What a complete adapter says of itself; every byte of it has been read.

    Errors: `AdapterNotFound` where a file is missing, `CorruptFile` where one cannot be read, or
    holds other weights than config.json says.
    """
    config = adapter_files.read_config(str(folder))
    weights = sum(tensor.numel() for tensor in adapter_files.read_weights(folder).values())
    if weights != config.parameters:
        raise CorruptFile(
            f"'{folder / WEIGHTS}' holds {weights} weights, and {CONFIG} says "
            f"{config.parameters}: they are not of one adapter. Fetch both again."
        )
    if config.vocabulary is not None:
        adapter_files.draft_vocabulary(str(folder), config.vocabulary)
    return config


def prepare(config: PushConfig) -> Path:
    """The folder that is uploaded: the adapter's files, `README.md`, `SHA256SUMS`, and `CODE`.
    Errors: `ConfigError` for a name that the hub would refuse, or other files there; as `check`.
    """
    _check_repo(config.repo)
    if config.base_model is not None:
        _check_repo(config.base_model, "base_model")
    source, output = adapter_files.find(config.source), Path(config.output)
    described = check(source)
    names = [name for name in FILES if (source / name).is_file()]
    expected = {*FILES, CARD, SUMS, CODE}
    strangers = {file.name for file in output.glob("*")} - expected
    if strangers or output.resolve() == source.resolve():
        what = f"holds {min(strangers)}" if strangers else "is the adapter's own folder"
        raise ConfigError(f"output='{output}' {what}; pass output= a folder of its own.")
    shutil.rmtree(output, ignore_errors=True)  # what an earlier push left
    (output / CODE).mkdir(parents=True)
    for name in CODE_FILES:
        shutil.copy(of_project("integrations/transformers") / name, output / CODE)
    for name in names:
        shutil.copy(source / name, output)
    hashes = {name: _sha256(output / name) for name in names}
    (output / SUMS).write_text("".join(f"{sha}  {name}\n" for name, sha in hashes.items()))
    text = card(described, config.repo, hashes, config.base_model, config.license)
    (output / CARD).write_text(text, encoding="utf-8")
    return output


def push(config: PushConfig) -> str | None:
    """Upload an adapter with its card in one commit, whose address is returned; None of a dry run.

    Errors: those of `prepare`; `HubError` where the hub cannot be reached or refuses.
    """
    folder = prepare(config)
    if config.dry_run:
        return None
    api = HfApi()
    with _told(f"'{config.repo}' was not uploaded"):
        api.create_repo(config.repo, private=config.private, exist_ok=True)
        if config.revision is not None:
            api.create_branch(config.repo, branch=config.revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=config.repo,
            folder_path=folder,
            commit_message=config.message,
            revision=config.revision,
        )
    return str(done.commit_url)


def pull(config: PullConfig) -> AdapterConfig:
    """Fetch an adapter into a folder that appears whole or not at all, and say what it is. What
    was stopped goes on where it was, in the hub's cache.

    Errors: `ConfigError` where the folder is there already; `AdapterNotFound` where there is no
    such repository or revision, or it holds no adapter; `CorruptFile`; `HubError`.
    """
    _check_repo(config.repo)
    with new_folder(Path(config.output)) as partial:
        with _told(f"'{config.repo}' was not fetched"):
            about = HfApi().model_info(config.repo, revision=config.revision)
        there = {file.rfilename for file in about.siblings or ()}
        for name in FILES[:2]:
            if name not in there:
                raise AdapterNotFound(
                    f"'{config.repo}' on the hub holds no {name}; it is no adapter."
                )
        names = [name for name in (*FILES, CARD, SUMS) if name in there]
        with _told(f"'{config.repo}' was not fetched whole"):
            # of this commit, whatever is committed meanwhile
            cached = snapshot_download(config.repo, revision=about.sha, allow_patterns=names)
        for name in names:
            shutil.copy(Path(cached, name), partial)
        try:
            _check_sums(partial)
            described = check(partial)
        except (CorruptFile, AdapterNotFound) as error:
            raise CorruptFile(
                f"what '{config.repo}' holds at {about.sha} is no whole adapter: {error} If it "
                f"fails again without '{cached}', its owner has to push it again."
            ) from error
        origin = {"repo": config.repo, "revision": config.revision, "commit": about.sha}
        (partial / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
    return described


def _check_repo(name: str, option: str = "repo") -> None:
    try:
        validate_repo_id(name)
        if "/" not in name:
            raise HFValidationError("the user is missing.")
    except HFValidationError as error:
        raise ConfigError(
            f"{option}='{name}' is no name of a repository: {error} Write USER/NAME."
        ) from error


# By what the hub's client raises: what a user gets, why, and what to do.
FAULTS = (
    (RevisionNotFoundError, AdapterNotFound, "it has no such revision"),
    (
        RepositoryNotFoundError,
        AdapterNotFound,
        "the hub has no such repository, or you may not see it, or not write to it. Check the "
        "name, and: hf auth login",
    ),
    (ValueError, HubError, "the hub refused what was sent"),
    (
        HfHubHTTPError,
        HubError,
        "the hub refused. To write, and to read what is private, it needs a token of yours that "
        "may: hf auth login",
    ),
    (
        (HTTPError, LocalEntryNotFoundError, ConnectionError, TimeoutError),
        HubError,
        "the hub cannot be reached. Go online, and unset HF_HUB_OFFLINE; the same command then "
        "goes on",
    ),
)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Say what failed in our words."""
    try:
        yield
    except Exception as error:
        for raised, kind, reason in FAULTS:
            if isinstance(error, raised):
                line = " ".join(str(error).split())
                raise kind(f"{what}: {reason}. ({line})") from error
        raise


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _check_sums(folder: Path) -> None:
    """Compare the files with the hashes that came with them, as `sha256sum -c` does.

    Errors: `CorruptFile`.
    """
    if not (folder / SUMS).is_file():
        log.warning("there is no %s with it: its files can be read, but not compared", SUMS)
        return
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        expected, _, name = line.partition("  ")
        if name not in FILES or not (folder / name).is_file() or _sha256(folder / name) != expected:
            raise CorruptFile(f"'{name}' is not the file that {SUMS} was made of.")
