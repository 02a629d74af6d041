"""A dataset in progress: named files of samples, each written completely or not at all.

Where records of the target's distributions are kept, those of a shard lie in a file beside it.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kangaroo.data import store
from kangaroo.models.prompts import Sample
from kangaroo.utils.errors import CorruptFile, DataError
from kangaroo.utils.provenance import changes

SETTINGS = "settings.json"


class Shards:
    """A folder of shards, each a pure function of the folder's settings and of its own name.

    Args:
        settings: all that a shard's content depends on; with `teacher`, its samples have records.

    Errors: `DataError` for a folder begun with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder, self.keeps = folder, bool(settings.get("teacher"))
        path = folder / SETTINGS
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            # a name of its own: other processes of the run write the same file
            part = path.with_suffix(f".{uuid.uuid4().hex}.part")
            part.write_text(json.dumps(settings, indent=2) + "\n")
            os.replace(part, path)
        if changed := changes(_json(path, path.read_text()), settings):
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
            store.save_records(self.path(name).with_suffix(".npy"), samples)
        part = self.path(name).with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(store.without_records(sample)) + "\n")
        os.replace(part, self.path(name))

    def read(self, name: str) -> list[Sample]:
        """The samples of a shard. Errors: `CorruptFile` where it is not as it was written."""
        path = self.path(name)
        with path.open(encoding="utf-8") as file:
            samples: list[Sample] = [_json(path, line) for line in file]
        if self.keeps:
            store.attach_records(path.with_suffix(".npy"), samples, path)
        return samples


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CorruptFile(
            f"{path} cannot be read ({error}); delete it, so that it is written anew."
        ) from error
