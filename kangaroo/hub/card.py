"""The model card of an adapter: what its config.json says, for readers who do not know it."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import ChainableUndefined, Template

from kangaroo.drafters.base import DrafterConfig
from kangaroo.heads.adapter_files import AdapterConfig
from kangaroo.models.loading import options_of
from kangaroo.utils import tables
from kangaroo.utils.discovery import classes
from kangaroo.utils.folders import command_line

TEMPLATE = Path(__file__).with_name("card.md")
# What each drafter's trained part is called, and who described it.
KINDS = {
    "kangaroo": "A Kangaroo adapter ([arXiv 2404.18911](https://arxiv.org/abs/2404.18911))",
    "medusa": "Medusa heads ([arXiv 2401.10774](https://arxiv.org/abs/2401.10774))",
    "block": "A block head, which drafts in one pass ([P-EAGLE](https://arxiv.org/abs/2602.01469))",
    "eagle": "An EAGLE head ([arXiv 2401.15077](https://arxiv.org/abs/2401.15077))",
}
UNKNOWN_MODEL = "FOLDER-OR-HUB-ID-OF-THE-MODEL"


def card(
    config: AdapterConfig,
    repo: str,
    hashes: Mapping[str, str],
    base_model: str | None = None,
    license: str | None = None,
) -> str:
    """`README.md` of an adapter's repository `repo`, whose files have these SHA-256 by name: YAML
    for the hub, then text. `base_model` is the hub id of a target that came from elsewhere,
    `license` an identifier of the hub's, such as "apache-2.0"."""
    drafter = config.architecture.drafter
    is_on_hub = repo_fault(config.target) is None and not Path(config.target).exists()
    base_model = base_model or (config.target if is_on_hub else None)
    model = options_of(config.target).get("model") or base_model or UNKNOWN_MODEL
    # a folder of somebody's machine: its last part alone says something to others
    target = f"`{Path(config.target).name}`"
    if base_model is not None:
        target = f"[{base_model}](https://huggingface.co/{base_model})"
    front_matter = ModelCardData(
        library_name="kangaroo",
        tags=[*dict.fromkeys(("kangaroo", "speculative-decoding", "custom_generate", drafter))],
        base_model=base_model,
        base_model_relation=base_model and "adapter",
        license=license,
    )
    template = Template(
        TEMPLATE.read_text("utf-8"),
        undefined=ChainableUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    kind = {"kind": config.architecture.kind()}
    return template.render(
        front_matter=front_matter.to_yaml(),
        config=asdict(config) | {"architecture": kind | asdict(config)["architecture"]},
        repo=repo,
        hashes=hashes,
        kind=KINDS[drafter],
        target=target,
        model=model,
        drafter_class=classes("kangaroo.drafters", DrafterConfig)[drafter],
        measure=measure(model, drafter, repo),
        table=_table,
        metrics=_metrics,
    )


def measure(model: str, drafter: str, repo: str) -> str:
    """The command that measures the adapter."""
    target = options_of(model)
    return command_line("evaluate", **target, drafter=drafter, drafter__adapter=repo, bench="demo")


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
