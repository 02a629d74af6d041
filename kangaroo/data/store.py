"""A dataset on disk: a `datasets` folder with its provenance beside it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kangaroo.data import logit_store
from kangaroo.models.prompts import Sample
from kangaroo.utils.errors import DataError
from kangaroo.utils.provenance import provenance

PROVENANCE = "provenance.json"


def save(
    samples: list[Sample], path: Path, settings: dict[str, Any], facts: dict[str, Any]
) -> None:
    """Write samples and their provenance, which comes last and marks the dataset as complete.

    Args:
        settings: all that the dataset is a function of.
        facts: what else is known about it, as JSON values.
    """
    (path / PROVENANCE).unlink(missing_ok=True)  # until the end it is no dataset
    from datasets import Dataset  # here, since it takes seconds to import

    Dataset.from_list([dict(logit_store.without(sample)) for sample in samples]).save_to_disk(path)
    logit_store.save(path / logit_store.NAME, samples)
    recorded = {
        "settings": settings,
        "fingerprint": fingerprint(samples),
        "conversations": len(samples),
        "tokens": sum(len(sample["input_ids"]) for sample in samples),
        "assistant_tokens": sum(sum(sample["loss_mask"]) for sample in samples),
    } | facts
    part = (path / PROVENANCE).with_suffix(".part")
    part.write_text(json.dumps(recorded | provenance(), indent=2) + "\n")
    os.replace(part, path / PROVENANCE)


def is_complete(path: Path) -> bool:
    """Whether a finished dataset lies there; one that is being written does not count."""
    return (path / PROVENANCE).is_file()


def is_of(path: Path, settings: dict[str, Any]) -> bool:
    """Whether a complete dataset that was made with just these settings lies there."""
    return is_complete(path) and about(path)["settings"] == settings


def about(path: Path) -> dict[str, Any]:
    """The provenance of a complete dataset.

    Errors: `DataError` where there is none.
    """
    if not is_complete(path):
        raise DataError(f"'{path}' holds no complete dataset ({PROVENANCE} is missing).")
    return json.loads((path / PROVENANCE).read_text())


def load(path: Path) -> tuple[list[Sample], dict[str, Any]]:
    """The samples and their provenance.

    Errors: `DataError` where the folder is no such dataset, or its samples are not those that its
    provenance describes; `CorruptFile` where the records of the target's distributions are not.
    """
    from datasets import load_from_disk

    recorded = about(path)
    try:
        samples = load_from_disk(path).to_list()
    except (OSError, ValueError) as error:
        raise DataError(f"dataset '{path}' cannot be read ({error}); delete it.") from error
    if recorded.get("teacher"):
        logit_store.attach(path / logit_store.NAME, samples, path)
    if fingerprint(samples) != recorded["fingerprint"]:
        raise DataError(f"dataset '{path}' is not what its {PROVENANCE} describes; delete it.")
    return samples, recorded


def fingerprint(samples: list[Sample]) -> str:
    """Hash of all tokens, loss masks and records of the target's distributions, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample["input_ids"], sample["loss_mask"]]).encode())
        if "teacher" in sample:
            digest.update(sample["teacher"].tobytes())
    return digest.hexdigest()[:16]
