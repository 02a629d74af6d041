"""A dataset on disk: a folder of shards in progress; in the end one of `datasets`, with provenance.

Records of the target's distributions (`topk_logits.py`), one for each token of the assistant, lie
in an array of numpy's format beside it, which is read where it lies.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kangaroo.models.prompts import Sample, Tokenizer
from kangaroo.utils.errors import CorruptFile, DataError
from kangaroo.utils.folders import write_json, write_whole
from kangaroo.utils.provenance import differences, provenance

PROVENANCE, RECORDS, SETTINGS = "provenance.json", "teacher.npy", "settings.json"


def save(
    samples: list[Sample], path: Path, settings: dict[str, Any], facts: dict[str, Any]
) -> None:
    """Write samples and their provenance, which comes last and marks the dataset as complete:
    settings are all that it is a function of, facts what else is known, as JSON values."""
    (path / PROVENANCE).unlink(missing_ok=True)  # until the end it is no dataset
    from datasets import Dataset  # here, since it takes seconds to import

    Dataset.from_list([_text(sample) for sample in samples]).save_to_disk(path)
    save_records(path / RECORDS, samples)
    recorded = {
        "settings": settings,
        "fingerprint": fingerprint(samples),
        "conversations": len(samples),
        "tokens": sum(len(sample["input_ids"]) for sample in samples),
        "assistant_tokens": sum(sum(sample["loss_mask"]) for sample in samples),
    } | facts
    write_json(path / PROVENANCE, recorded | provenance())


def is_complete(path: Path) -> bool:
    """Whether a finished dataset lies there; one that is being written does not count."""
    return (path / PROVENANCE).is_file()


def is_of(path: Path, settings: dict[str, Any]) -> bool:
    """Whether a complete dataset that was made with just these settings lies there."""
    return is_complete(path) and about(path)["settings"] == settings


def about(path: Path) -> dict[str, Any]:
    """The provenance of a complete dataset. Errors: `DataError` where there is none."""
    if not is_complete(path):
        raise DataError(f"'{path}' holds no complete dataset ({PROVENANCE} is missing).")
    return json.loads((path / PROVENANCE).read_text())


def load(path: Path) -> tuple[list[Sample], dict[str, Any]]:
    """The samples and their provenance. Errors: `DataError` where the folder is no such dataset, or
    not what its provenance describes; `CorruptFile` where its records cannot be read."""
    from datasets import load_from_disk

    recorded = about(path)
    try:
        samples = load_from_disk(path).to_list()
    except (OSError, ValueError) as error:
        raise DataError(f"dataset '{path}' cannot be read ({error}); delete it.") from error
    if recorded.get("teacher"):
        attach_records(path / RECORDS, samples, path)
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


class Shards:
    """A folder of shards, each a pure function of the folder's settings and of its own name. With
    `teacher` in the settings, samples have records. Errors: `DataError` for other settings."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder, self.keeps = folder, bool(settings.get("teacher"))
        path = folder / SETTINGS
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, settings)
        if changed := differences(_json(path, path.read_text()), settings):
            raise DataError(
                f"{folder} was begun with other settings ({changed}). Go on with the same ones, "
                "pass data.path= another folder, or delete it."
            )

    def path(self, name: str) -> Path:
        """The file of that shard, written or not."""
        return self.folder / f"{name}.jsonl"

    def write(self, name: str, samples: Sequence[Sample]) -> None:
        """Write a shard; its `.jsonl` file comes last, so one of a killed process has none."""
        if self.keeps:
            save_records(self.path(name).with_suffix(".npy"), samples)
        lines = [json.dumps(_text(sample)) + "\n" for sample in samples]
        write_whole(self.path(name), "".join(lines).encode())

    def read(self, name: str) -> list[Sample]:
        """The samples of a shard. Errors: `CorruptFile` where it is not as it was written."""
        path = self.path(name)
        with path.open(encoding="utf-8") as file:
            samples: list[Sample] = [_json(path, line) for line in file]
        if self.keeps:
            attach_records(path.with_suffix(".npy"), samples, path)
        return samples


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CorruptFile(
            f"{path} cannot be read ({error}); delete it, so that it is written anew."
        ) from error


def save_records(path: Path, samples: Sequence[Sample]) -> None:
    """Write the records of all samples, or nothing where there are none."""
    stored = [sample["teacher"] for sample in samples if "teacher" in sample]
    if not stored:
        path.unlink(missing_ok=True)
        return
    part = path.with_suffix(".npy.part")
    shape = (sum(map(len, stored)),)
    written = np.lib.format.open_memmap(part, mode="w+", dtype=stored[0].dtype, shape=shape)
    np.concatenate(stored, out=written)
    written.flush()
    os.replace(part, path)


def attach_records(path: Path, samples: Sequence[Sample], whole: Path) -> None:
    """Give every sample its records. Errors: `CorruptFile` where they are not those of these
    samples, and `whole` is to be deleted."""
    if not samples:
        return
    counts = [sum(sample["loss_mask"]) for sample in samples]
    try:
        records = np.load(path, mmap_mode="r").view(np.ndarray)
        if len(records) != sum(counts):
            raise ValueError(f"{len(records)} records for {sum(counts)} tokens of the assistant")
    except (OSError, ValueError) as error:
        raise CorruptFile(
            f"{path} cannot be read ({error}); delete {whole}, so that it is written anew."
        ) from error
    stops = np.cumsum(counts)
    for sample, start, stop in zip(samples, stops - counts, stops, strict=True):
        sample["teacher"] = records[start:stop]


def _text(sample: Sample) -> dict[str, Any]:
    """The sample without records."""
    return {name: value for name, value in sample.items() if name != "teacher"}


def documents(
    dataset: str | None, texts: Sequence[str], tokenizer: Tokenizer
) -> tuple[list[list[int]], dict[str, Any]]:
    """The token ids of each document of a datastore, conversations of a dataset and text files, and
    the origin of all as JSON values. Errors: `DataError` where there is nothing, or no text."""
    if dataset is None and not texts:
        raise DataError("nothing to build a datastore of; pass data= or texts=[file, ...].")
    collected: list[list[int]] = []
    origin: dict[str, Any] = {"dataset": None, "texts": list(texts)}
    if dataset is not None:
        samples, origin["dataset"] = load(Path(dataset))
        collected += [sample["input_ids"] for sample in samples]
    for path in texts:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"text '{path}' cannot be read ({error}); pass UTF-8 files.") from error
        collected.append(tokenizer.encode(text, add_special_tokens=False))
    return collected, origin
