"""Writes checked adapters, each with a model card, as repositories for the hub."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import ChainableUndefined, Template

from kangaroo.heads import adapter_files
from kangaroo.heads.adapter_files import CONFIG, VOCABULARY, WEIGHTS, AdapterConfig
from kangaroo.models.loading import known_model
from kangaroo.utils import tables
from kangaroo.utils.errors import ConfigError, CorruptFile
from kangaroo.utils.folders import command_line, project_folder

CARD = "README.md"
FILES = (WEIGHTS, CONFIG, VOCABULARY)  # of an adapter's folder
# for transformers' `generate(custom_generate=...)`, copied from integrations/transformers
CODE = "custom_generate"
CODE_FILES = ("generate.py", "requirements.txt")
TEMPLATE = Path(__file__).with_name("card.md")
UNKNOWN_MODEL = "FOLDER-OR-HUB-ID-OF-THE-MODEL"


@dataclass
class PackConfig:
    """A folder to upload to the hub.

    Args:
        source: the adapter's folder. (`adapter=` is the group of train.py.)
        repo: repository on the hub, USER/NAME.
        output: folder for exactly the files of the repository.
        base_model: hub id of the target, if the adapter's config does not contain it.
        license: the adapter's, an identifier of the hub such as apache-2.0; None states none.
    """

    source: str
    repo: str
    output: str
    base_model: str | None = None
    license: str | None = None


def check(folder: Path) -> AdapterConfig:
    """Read a complete adapter and return its config. Errors: `AdapterNotFound` if a file is
    missing, `CorruptFile` if one cannot be read or the files do not belong together."""
    config = adapter_files.read_config(str(folder))
    n_weights = sum(tensor.numel() for tensor in adapter_files.read_weights(folder).values())
    if n_weights != config.parameters:
        raise CorruptFile(
            f"'{folder / WEIGHTS}' holds {n_weights} weights, and {CONFIG} says "
            f"{config.parameters}: they are not of one adapter. Fetch both again."
        )
    if config.vocabulary is not None:
        adapter_files.draft_vocabulary(str(folder), config.vocabulary)
    return config


def pack(config: PackConfig) -> Path:
    """Write the folder of a repository: the adapter's files, `README.md` and `CODE`.
    Errors: those of `check`; `ConfigError` for an invalid name, or a folder with other files."""
    for option, name in {"repo": config.repo, "base_model": config.base_model}.items():
        if name is not None and (fault := repo_fault(name)):
            problem = f"{option}='{name}' is no name of a repository: {fault}"
            raise ConfigError(f"{problem} Write USER/NAME.")
    source = adapter_files.find(config.source)
    output = Path(config.output)
    adapter = check(source)
    unknown = {file.name for file in output.glob("*")} - {*FILES, CARD, CODE}
    if unknown or output.resolve() == source.resolve():
        problem = f"holds {min(unknown)}" if unknown else "is the adapter's own folder"
        raise ConfigError(f"output='{output}' {problem}; pass output= a folder of its own.")
    shutil.rmtree(output, ignore_errors=True)  # left by an earlier run
    (output / CODE).mkdir(parents=True)
    for name in CODE_FILES:
        shutil.copy(project_folder("integrations/transformers") / name, output / CODE)
    for name in FILES:
        if (source / name).is_file():
            shutil.copy(source / name, output)
    (output / CARD).write_text(card(adapter, config), encoding="utf-8")
    return output


def card(adapter: AdapterConfig, config: PackConfig) -> str:
    """The model card: `README.md` with YAML for the hub."""
    drafter = adapter.architecture.drafter
    is_on_hub = repo_fault(adapter.target) is None and not Path(adapter.target).exists()
    base_model = config.base_model or (adapter.target if is_on_hub else None)
    known = known_model(adapter.target) or {}
    model = known.get("name") or base_model or UNKNOWN_MODEL
    target = f"`{Path(adapter.target).name}`"  # only a name, since a local path means nothing
    if base_model is not None:
        target = f"[{base_model}](https://huggingface.co/{base_model})"
    front_matter = ModelCardData(
        library_name="kangaroo",
        tags=[*dict.fromkeys(("kangaroo", "speculative-decoding", "custom_generate", drafter))],
        base_model=base_model,
        base_model_relation=base_model and "adapter",
        license=config.license,
    )
    options: Any = {"trim_blocks": True, "keep_trailing_newline": True}
    template = Template(TEMPLATE.read_text("utf-8"), undefined=ChainableUndefined, **options)
    return template.render(
        front_matter=front_matter.to_yaml(),
        config=asdict(adapter) | {"architecture": adapter.architecture.as_json()},
        repo=config.repo,
        target=target,
        model=model,
        drafter=drafter,
        measure=command_line(
            "evaluate", model=model, drafter=drafter, drafter__adapter=config.repo, bench="demo"
        ),
        table=_table,
        metrics=_metrics,
    )


def repo_fault(name: str) -> str | None:
    """The problem with the name of a repository on the hub; None if it is valid."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error)
    return None if "/" in name else "the user is missing."


def _table(facts: list[tuple[str, Any]]) -> str:
    """A table of the known facts. Settings are in one line, without nested ones."""
    rows = []
    for name, fact in facts:
        if isinstance(fact, dict):
            plain = {k: v for k, v in fact.items() if v is not None and not isinstance(v, dict)}
            fact = ", ".join(f"{k}={v}" for k, v in plain.items())
        if fact:
            rows.append({"": name, " ": str(fact)})
    return tables.markdown(rows) if rows else ""


def _metrics(results: Mapping[str, float]) -> str:
    """One row of metrics, without those of later draft steps, such as `step2/loss`."""
    return tables.markdown([{k: tables.number(v, 3) for k, v in results.items() if "/" not in k}])
