"""Adapters to the hub, whole and checked, in one commit with a model card; and from it."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from jinja2 import ChainableUndefined, Template

from kangaroo.drafters.base import DrafterConfig
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter_files import CONFIG, VOCABULARY, WEIGHTS, AdapterConfig
from kangaroo.models.loading import options_of, to_measure
from kangaroo.utils import tables
from kangaroo.utils.discovery import classes
from kangaroo.utils.errors import AdapterNotFound, ConfigError, CorruptFile, HubError
from kangaroo.utils.folders import new_folder, project_folder

CARD, SUMS = "README.md", "SHA256SUMS"
FILES = (WEIGHTS, CONFIG, VOCABULARY)  # what is sent of an adapter's folder
# what transformers' `generate(custom_generate=...)` looks for, taken from integrations/transformers
CODE, CODE_FILES = "custom_generate", ("generate.py", "requirements.txt")
TEMPLATE = Path(__file__).with_name("card.md")
# What each drafter's trained part is called, and who described it.
KINDS = {
    "kangaroo": "A Kangaroo adapter ([arXiv 2404.18911](https://arxiv.org/abs/2404.18911))",
    "medusa": "Medusa heads ([arXiv 2401.10774](https://arxiv.org/abs/2401.10774))",
    "block": "A block head, which drafts in one pass ([P-EAGLE](https://arxiv.org/abs/2602.01469))",
    "eagle": "An EAGLE head ([arXiv 2401.15077](https://arxiv.org/abs/2401.15077))",
}
UNKNOWN_MODEL = "FOLDER-OR-HUB-ID-OF-THE-MODEL"


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
    """

    source: str
    repo: str
    output: str
    revision: str | None = None
    private: bool = False
    dry_run: bool = False
    base_model: str | None = None
    license: str | None = None


@dataclass
class PullConfig:
    """An adapter from the hub: of `repo` (USER/NAME) at a branch, tag or commit, `revision`, or on
    its main branch; into the folder `output`, which must not be there yet."""

    repo: str
    output: str
    revision: str | None = None


def check(folder: Path) -> AdapterConfig:
    """What a complete adapter says of itself; every byte of it has been read. Errors:
    `AdapterNotFound` where a file is missing, `CorruptFile` where one cannot be read, or holds
    other weights than config.json says."""
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
    Errors: `ConfigError` for a name that the hub would refuse, or other files there; as `check`."""
    _check_repos(repo=config.repo, base_model=config.base_model)
    source, output = adapter_files.find(config.source), Path(config.output)
    described = check(source)
    names = [name for name in FILES if (source / name).is_file()]
    strangers = {file.name for file in output.glob("*")} - {*FILES, CARD, SUMS, CODE}
    if strangers or output.resolve() == source.resolve():
        what = f"holds {min(strangers)}" if strangers else "is the adapter's own folder"
        raise ConfigError(f"output='{output}' {what}; pass output= a folder of its own.")
    shutil.rmtree(output, ignore_errors=True)  # what an earlier push left
    (output / CODE).mkdir(parents=True)
    for name in CODE_FILES:
        shutil.copy(project_folder("integrations/transformers") / name, output / CODE)
    for name in names:
        shutil.copy(source / name, output)
    hashes = {name: hashlib.sha256((output / name).read_bytes()).hexdigest() for name in names}
    (output / SUMS).write_text("".join(f"{sha}  {name}\n" for name, sha in hashes.items()))
    (output / CARD).write_text(card(described, config, hashes), encoding="utf-8")
    return output


def push(config: PushConfig) -> str | None:
    """Upload an adapter with its card in one commit, whose address is returned; None of a dry run.
    Errors: those of `prepare`; `HubError` where the hub cannot be reached or refuses."""
    folder = prepare(config)
    if config.dry_run:
        return None
    api = HfApi()
    with _explained(f"'{config.repo}' was not uploaded"):
        api.create_repo(config.repo, private=config.private, exist_ok=True)
        if config.revision is not None:
            api.create_branch(config.repo, branch=config.revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=config.repo,
            folder_path=folder,
            commit_message="Upload an adapter with Kangaroo",
            revision=config.revision,
        )
    return str(done.commit_url)


def pull(config: PullConfig) -> AdapterConfig:
    """Fetch an adapter into a folder that appears whole or not at all, and say what it is. Errors:
    `ConfigError` for a folder that is there, or a name that is none; those of `check`, for what is
    no adapter; `HubError` where the hub cannot be reached or refuses."""
    _check_repos(repo=config.repo)
    with new_folder(Path(config.output)) as folder:
        with _explained(f"'{config.repo}' was not fetched"):
            # through the hub's cache, where what breaks off goes on
            names = [*FILES, CARD]
            cached = snapshot_download(config.repo, revision=config.revision, allow_patterns=names)
        for name in names:
            if (file := Path(cached, name)).is_file():
                shutil.copy(file, folder)
        try:
            return check(folder)
        except (AdapterNotFound, CorruptFile) as error:
            raise type(error)(f"'{config.repo}' holds no whole adapter: {error}") from error


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except (HTTPError, ValueError, OSError) as error:  # the hub's own errors are OSErrors
        reason = "the hub cannot be reached. Go online, and unset HF_HUB_OFFLINE"
        if isinstance(error, HfHubHTTPError):
            reason = (
                "the hub refused. Check the name. To write, and to read what is private, it needs "
                "a token of yours that may: hf auth login"
            )
        elif isinstance(error, ValueError):
            reason = "the hub refused what was sent"
        line = " ".join(str(error).split())
        raise HubError(f"{what}: {reason}. ({line})") from error


def _check_repos(**names: str | None) -> None:
    for option, name in names.items():
        if name is not None and (fault := repo_fault(name)):
            problem = f"{option}='{name}' is no name of a repository: {fault} Write USER/NAME."
            raise ConfigError(problem)


def card(adapter: AdapterConfig, config: PushConfig, hashes: Mapping[str, str]) -> str:
    """`README.md` of an adapter's repository, whose files have these SHA-256 by name: YAML for the
    hub, then text."""
    drafter = adapter.architecture.drafter
    is_on_hub = repo_fault(adapter.target) is None and not Path(adapter.target).exists()
    base_model = config.base_model or (adapter.target if is_on_hub else None)
    model = options_of(adapter.target).get("model") or base_model or UNKNOWN_MODEL
    # a folder of somebody's machine: its last part alone says something to others
    target = f"`{Path(adapter.target).name}`"
    if base_model is not None:
        target = f"[{base_model}](https://huggingface.co/{base_model})"
    front_matter = ModelCardData(
        library_name="kangaroo",
        tags=[*dict.fromkeys(("kangaroo", "speculative-decoding", "custom_generate", drafter))],
        base_model=base_model,
        base_model_relation=base_model and "adapter",
        license=config.license,
    )
    template = Template(
        TEMPLATE.read_text("utf-8"),
        undefined=ChainableUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return template.render(
        front_matter=front_matter.to_yaml(),
        config=asdict(adapter) | {"architecture": adapter.architecture.as_json()},
        repo=config.repo,
        hashes=hashes,
        kind=KINDS[drafter],
        target=target,
        model=model,
        drafter_class=classes("kangaroo.drafters", DrafterConfig)[drafter],
        measure=to_measure(model, drafter=drafter, drafter__adapter=config.repo, bench="demo"),
        table=_table,
        metrics=_metrics,
    )


def repo_fault(name: str) -> str | None:
    """What is wrong with the name of a user's repository on the hub; None where nothing is."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return None if "/" in name else "the user is missing."


def _table(facts: list[tuple[str, Any]]) -> str:
    """A row for each that is known; of settings that are plain and say something, in a line."""
    rows = []
    for name, fact in facts:
        if isinstance(fact, dict):
            plain = {k: v for k, v in fact.items() if v is not None and not isinstance(v, dict)}
            fact = ", ".join(f"{k}={v}" for k, v in plain.items())
        if fact:
            rows.append({"": name, " ": str(fact)})
    return tables.markdown(rows) if rows else ""


def _metrics(results: Mapping[str, float]) -> str:
    """In one row, but those of later draft steps, as `step2/loss`, which stay in config.json."""
    return tables.markdown([{k: tables.number(v, 3) for k, v in results.items() if "/" not in k}])
