"""Datasets on disk: a folder of shards in progress, then a folder of `datasets` with provenance.

Records of the target's distributions (`topk_logits.py`), one for each token of the assistant, are
in a memory-mapped numpy file beside it.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import compute

from kangaroo.models.prompts import Sample, Tokenizer, unknown_token
from kangaroo.utils.errors import ConfigError, CorruptFile, DataError, explained
from kangaroo.utils.folders import write_json, write_whole
from kangaroo.utils.provenance import check_same, provenance

PROVENANCE = "provenance.json"
RECORDS = "teacher.npy"
SETTINGS = "settings.json"


def save(
    samples: list[Sample], path: Path, settings: dict[str, Any], facts: dict[str, Any]
) -> None:
    """Write samples, and last their provenance, which marks the dataset as complete. The dataset is
    a function of `settings`; `facts` are further provenance. Both are JSON values."""
    (path / PROVENANCE).unlink(missing_ok=True)
    from datasets import Dataset  # here, since the import takes seconds

    Dataset.from_list([_without_records(sample) for sample in samples]).save_to_disk(path)
    save_records(path / RECORDS, samples)
    described = {
        "settings": settings,
        "fingerprint": fingerprint(samples),
        "conversations": len(samples),
        "tokens": sum(len(sample["input_ids"]) for sample in samples),
        "assistant_tokens": sum(sum(sample["loss_mask"]) for sample in samples),
    }
    write_json(path / PROVENANCE, described | facts | provenance())


def is_complete(path: Path) -> bool:
    """Whether the folder has a finished dataset."""
    return (path / PROVENANCE).is_file()


def has_settings(path: Path, settings: dict[str, Any]) -> bool:
    """Whether the folder has a finished dataset with exactly these settings. Errors: `ConfigError`
    where there can be no such folder, before anything is written for it."""
    for place in (path, *path.parents):
        if place.is_file():
            raise ConfigError(f"data.path={path}: '{place}' is a file. Pass a folder.")
    return is_complete(path) and read_provenance(path)["settings"] == settings


def read_provenance(path: Path) -> dict[str, Any]:
    """The provenance of a finished dataset. Errors: `DataError` if there is none."""
    if not is_complete(path):
        raise DataError(f"'{path}' holds no complete dataset ({PROVENANCE} is missing).")
    return json.loads((path / PROVENANCE).read_text())


def load(path: Path, vocab_size: int = 1 << 31) -> tuple[list[Sample], dict[str, Any]]:
    """The samples and their provenance. Errors: `DataError` if there is no finished dataset, not
    the one that its provenance describes, or one with tokens outside a vocabulary of this size;
    `CorruptFile` if its records cannot be read."""
    from datasets import load_from_disk

    described = read_provenance(path)
    with explained(DataError, f"dataset '{path}' cannot be read", "Delete it."):
        samples = load_from_disk(path).to_list()
    if described.get("teacher"):
        attach_records(path / RECORDS, samples, path)
    if fingerprint(samples) != described["fingerprint"]:
        raise DataError(f"dataset '{path}' is not what its {PROVENANCE} describes; delete it.")
    for number, sample in enumerate(samples):
        largest = [int(sample["teacher"]["tokens"].max(initial=0))] if "teacher" in sample else []
        if fault := unknown_token(sample["input_ids"] + largest, vocab_size):
            raise DataError(
                f"sample {number} of dataset '{path}' holds {fault}; was it written for another "
                "model? Delete it, or pass data.path= another folder."
            )
    return samples, described


def lengths(path: Path) -> list[int]:
    """The tokens of each conversation of a finished dataset, without reading these."""
    from datasets import load_from_disk

    return compute.list_value_length(load_from_disk(path).data["input_ids"]).to_pylist()


def fingerprint(samples: list[Sample]) -> str:
    """Hash of all tokens, loss masks and records, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample["input_ids"], sample["loss_mask"]]).encode())
        if "teacher" in sample:
            digest.update(sample["teacher"].tobytes())
    return digest.hexdigest()[:16]


class Shards:
    """A folder of shards, each a pure function of the folder's settings and its own name. With the
    setting `teacher`, samples have records. Errors: `ConfigError` if the folder has others."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder = folder
        self.has_records = bool(settings.get("teacher"))
        path = folder / SETTINGS
        if not path.exists():
            write_json(path, settings)
        check_same(folder, _json(path, path.read_text()), settings, "data.path=")

    def path(self, name: str) -> Path:
        """The shard's file, whether or not it is written."""
        return self.folder / f"{name}.jsonl"

    def write(self, name: str, samples: Sequence[Sample]) -> None:
        """Write a shard. Its `.jsonl` file comes last and marks it as complete."""
        if self.has_records:
            save_records(self.path(name).with_suffix(".npy"), samples)
        lines = [json.dumps(_without_records(sample)) + "\n" for sample in samples]
        write_whole(self.path(name), "".join(lines).encode())

    def read(self, name: str) -> list[Sample]:
        """The samples of a shard. Errors: `CorruptFile`."""
        path = self.path(name)
        with path.open(encoding="utf-8") as file:
            samples: list[Sample] = [_json(path, line) for line in file]
        if self.has_records:
            attach_records(path.with_suffix(".npy"), samples, path)
        return samples


def _json(path: Path, text: str) -> Any:
    with explained(CorruptFile, f"{path} cannot be read", "Delete it, so that it is written anew."):
        return json.loads(text)


def save_records(path: Path, samples: Sequence[Sample]) -> None:
    """Write the records of all samples; without any, delete the file."""
    records = [sample["teacher"] for sample in samples if "teacher" in sample]
    if not records:
        path.unlink(missing_ok=True)
        return
    part = path.with_suffix(".npy.part")
    shape = (sum(map(len, records)),)
    file = np.lib.format.open_memmap(part, mode="w+", dtype=records[0].dtype, shape=shape)
    np.concatenate(records, out=file)
    file.flush()
    os.replace(part, path)


def attach_records(path: Path, samples: Sequence[Sample], source: Path) -> None:
    """Give every sample its records. Errors: `CorruptFile`, which says to delete `source`."""
    if not samples:
        return
    counts = [sum(sample["loss_mask"]) for sample in samples]
    fix = f"Delete {source}, so that it is written anew."
    with explained(CorruptFile, f"{path} cannot be read", fix):
        records = np.load(path, mmap_mode="r").view(np.ndarray)
        if len(records) != sum(counts):
            raise ValueError(f"{len(records)} records for {sum(counts)} tokens of the assistant")
    for sample, part in zip(samples, np.split(records, np.cumsum(counts)[:-1]), strict=True):
        sample["teacher"] = part


def _without_records(sample: Sample) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "teacher"}


def documents(
    dataset: str | None, texts: Sequence[str], tokenizer: Tokenizer, vocab_size: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """The token ids of a datastore's documents, which are the dataset's conversations and the text
    files, and their origin as JSON values. Errors: `DataError`, also for tokens beyond
    `vocab_size`."""
    if dataset is None and not texts:
        raise DataError("nothing to build a datastore of; pass data= or texts=[file, ...].")
    token_ids: list[list[int]] = []
    origin: dict[str, Any] = {"dataset": None, "texts": list(texts)}
    if dataset is not None:
        samples, origin["dataset"] = load(Path(dataset), vocab_size)
        token_ids += [sample["input_ids"] for sample in samples]
    for path in texts:
        with explained(DataError, f"text '{path}' cannot be read", "Pass UTF-8 files."):
            text = Path(path).read_text(encoding="utf-8")
        token_ids.append(tokenizer.encode(text, add_special_tokens=False))
        if fault := unknown_token(token_ids[-1], vocab_size, tokenizer):
            raise DataError(f"text '{path}' holds {fault}; take it out of the text.")
    return token_ids, origin
