"""Records of the target's distributions, in a file beside the samples that they belong to.

The file is an array of numpy's own format: the records of one sample after those of another
(`topk_logits.py`), one for each token of the assistant. It is read where it lies, and memory
holds what is used alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kangaroo.models.prompts import Sample
from kangaroo.utils.errors import CorruptFile

NAME = "teacher.npy"


def save(path: Path, samples: Sequence[Sample]) -> None:
    """Write the records of all samples, or nothing where there are none."""
    stored = [sample["teacher"] for sample in samples if "teacher" in sample]
    if not stored:
        path.unlink(missing_ok=True)
        return
    part = path.with_suffix(".npy.part")
    shape = (sum(map(len, stored)),)
    written = np.lib.format.open_memmap(part, mode="w+", dtype=stored[0].dtype, shape=shape)
    start = 0
    for records in stored:
        written[start : start + len(records)] = records
        start += len(records)
    written.flush()
    os.replace(part, path)


def attach(path: Path, samples: Sequence[Sample], whole: Path) -> None:
    """Give every sample its records.

    Args:
        whole: what to delete where they are not those of these samples.

    Errors: `CorruptFile` in that case.
    """
    counts = [sum(sample["loss_mask"]) for sample in samples]
    if not samples:
        return
    try:
        records = np.load(path, mmap_mode="r").view(np.ndarray)
        if len(records) != sum(counts):
            raise ValueError(f"{len(records)} records for {sum(counts)} tokens of the assistant")
    except (OSError, ValueError) as error:
        raise CorruptFile(
            f"{path} cannot be read ({error}); delete {whole}, so that it is written anew."
        ) from error
    start = 0
    for sample, count in zip(samples, counts, strict=True):
        sample["teacher"] = records[start : start + count]
        start += count


def without(sample: Sample) -> Sample:
    """The sample as it stands in text."""
    return Sample(
        messages=sample["messages"],
        input_ids=sample["input_ids"],
        loss_mask=sample["loss_mask"],
    )
