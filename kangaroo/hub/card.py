"""The model card of an adapter: what its config.json says, for readers who do not know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from kangaroo.drafters.base import DrafterConfig
from kangaroo.heads.adapter_files import AdapterConfig
from kangaroo.models.loading import known_models, options_of
from kangaroo.utils import tables
from kangaroo.utils.discovery import classes
from kangaroo.utils.folders import command_line
from kangaroo.utils.tables import Row, number

# What each drafter's trained part is called, and who described it.
KINDS = {
    "kangaroo": "A Kangaroo adapter ([arXiv 2404.18911](https://arxiv.org/abs/2404.18911))",
    "medusa": "Medusa heads ([arXiv 2401.10774](https://arxiv.org/abs/2401.10774))",
    "eagle": "An EAGLE head ([arXiv 2401.15077](https://arxiv.org/abs/2401.15077))",
}
IN_TRANSFORMERS = 'model.generate(**inputs, custom_generate="{repo}", trust_remote_code=True)'
UNKNOWN_MODEL = "FOLDER-OR-HUB-ID-OF-THE-MODEL"
HELD_OUT = (
    "On text that it was not trained on, by teacher forcing: what it would draft at every "
    "position. `compression_rate` is tokens per forward of the target, with 6 draft tokens and the "
    "bonus token; `ctarN` the share of positions from which the first N draft tokens are all right."
)
DECODED = (
    "Decoded for real, greedily, from prompts of that text; `sampled_acceptance` at temperature 1:"
)


def card(
    config: AdapterConfig,
    repo: str,
    hashes: Mapping[str, str],
    base_model: str | None = None,
    license: str | None = None,
) -> str:
    """`README.md` of an adapter's repository: YAML for the hub, then text. What config.json does
    not say is left out.

    Args:
        repo: its hub id, which the examples load.
        hashes: SHA-256 of its files, by name.
        base_model: hub id of the target, for an adapter whose target came from elsewhere.
        license: an identifier of the hub's, such as "apache-2.0"; None names none.
    """
    drafter, name = config.architecture.drafter, short_name(config.target)
    base_model = base_model or (config.target if is_hub_id(config.target) else None)
    model = name or base_model or UNKNOWN_MODEL
    parts = [
        front_matter(base_model, drafter, license),
        f"# {repo.rpartition('/')[2]}",
        f"{KINDS[drafter]} for {_target(config, base_model)}, to draft tokens, which the model "
        "then verifies: the text is the one that the model alone would have written, sooner. It "
        f"reads the model's states after {config.exit_layer} of {config.n_layers} layers.",
        tables.markdown(_facts(config)),
        "## Use",
        f"```python\n{example(model, drafter, repo)}\n```",
        "By transformers, with Kangaroo installed, for a model that is loaded already:",
        f"```python\n{IN_TRANSFORMERS.format(repo=repo)}\n```",
        "Measured against the model alone:",
        f"```\n{measure(model, drafter, repo)}\n```",
        *_results(config.training.get("progress", {})),
        *_origin(config.training),
        "## Files",
        tables.markdown([{"file": f"`{k}`", "SHA-256": f"`{v}`"} for k, v in hashes.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(base_model: str | None, drafter: str, license: str | None) -> str:
    """What the hub reads of a card."""
    tags = dict.fromkeys(("kangaroo", "speculative-decoding", "custom_generate", drafter))
    fields: dict[str, Any] = {"library_name": "kangaroo", "tags": list(tags)}
    if base_model is not None:
        fields |= {"base_model": base_model, "base_model_relation": "adapter"}
    if license is not None:
        fields["license"] = license
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def example(model: str, drafter: str, repo: str) -> str:
    """Python that loads the adapter from the hub and writes an answer."""
    lines = ["import kangaroo"]
    if drafter == "kangaroo":
        loaded = f'kangaroo.load("{model}", adapter="{repo}")'
    else:
        kind = classes("kangaroo.drafters", DrafterConfig)[drafter]
        lines.append(f"from {kind.__module__} import {kind.__name__}")
        loaded = f'kangaroo.load("{model}", drafter={kind.__name__}(adapter="{repo}"))'
    answer = 'print(model.generate("Why is the sky blue?", max_new_tokens=128))'
    return "\n".join([*lines, "", f"model = {loaded}", answer])


def measure(model: str, drafter: str, repo: str) -> str:
    """The command that measures the adapter."""
    target = options_of(model)
    return command_line("evaluate", **target, drafter=drafter, drafter__adapter=repo, bench="demo")


def short_name(target: str) -> str | None:
    """The name among `known_models` of what an adapter's config calls its target, if it has one."""
    return next((model["name"] for model in known_models() if model["path"] == target), None)


def is_hub_id(name: str) -> bool:
    """Whether this may name a user's repository on the hub, and is no folder here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not Path(name).exists()


def _target(config: AdapterConfig, base_model: str | None) -> str:
    if base_model is not None:
        return f"[{base_model}](https://huggingface.co/{base_model})"
    # a folder of somebody's machine: its last part alone says something to others
    return f"`{Path(config.target).name}`"


def _facts(config: AdapterConfig) -> list[Row]:
    parts = {"kind": config.architecture.kind()} | asdict(config)["architecture"]
    facts = {
        "trained parameters": f"{config.parameters:,}",
        "made of": ", ".join(f"{name}={value}" for name, value in parts.items()),
        "drafts from": f"the {config.vocabulary:,} most frequent tokens of its training data"
        if config.vocabulary
        else "the whole vocabulary",
        "revision of the model": config.target_revision,
        "hash of the model's config": f"`{config.target_hash}`",
    }
    return _listed(facts)


def _results(progress: dict[str, Any]) -> list[str]:
    parts = []
    for title, group in ((HELD_OUT, "held_out"), (DECODED, "decoded")):
        # those of later draft steps, as `step2/loss`, stay in config.json
        metrics = {k: number(v, 3) for k, v in progress.get(group, {}).items() if "/" not in k}
        if metrics:
            parts += [title, tables.markdown([metrics])]
    return ["## Results", *parts] if parts else []


def _origin(training: dict[str, Any]) -> list[str]:
    """Data, schedule, command, versions and hardware; or from where it was imported."""
    data, progress = training.get("data", {}), training.get("progress", {})
    adapter, trainer = training.get("adapter", {}), training.get("trainer", {})
    machine = training.get("hardware", {})
    facts = {
        "imported from": _words(training.get("imported")),
        "data": _words(data.get("settings")),
        "conversations": data.get("conversations"),
        "tokens of the assistant": data.get("assistant_tokens"),
        "fingerprint of the data": data.get("fingerprint"),
        "went on from": adapter.get("start"),
        "loss": adapter.get("loss"),
        "learning rate": adapter.get("learning_rate") or trainer.get("learning_rate"),
        "epochs": trainer.get("epochs"),
        "optimizer steps": progress.get("step"),
        "positions that entered the loss": progress.get("assistant_tokens"),
        "seconds": round(progress.get("seconds", 0)) or None,
        "hardware": machine.get("cuda") or machine.get("cpu"),
        "versions": _words(training.get("versions")),
        "git revision of Kangaroo": training.get("git_revision"),
        "time": training.get("time"),
    }
    rows = _listed(facts)
    if not rows:
        return []
    title = "Where it comes from" if "imported" in training else "How it was trained"
    command = training.get("command")
    by = [f"By this command:\n\n```\n{command}\n```"] if command else []
    return [f"## {title}", *by, tables.markdown(rows), "`config.json` has the rest."]


def _words(settings: Any) -> str | None:
    """Plain settings in a line, without those that say nothing; a text as it is."""
    if not isinstance(settings, dict):
        return settings if settings is None else str(settings)
    plain = {k: v for k, v in settings.items() if v is not None and not isinstance(v, dict)}
    return ", ".join(f"{name}={value}" for name, value in plain.items())


def _listed(facts: dict[str, Any]) -> list[Row]:
    """A row for each that is known."""
    return [{"": name, " ": str(value)} for name, value in facts.items() if value]
