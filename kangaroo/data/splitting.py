"""Split questions into some to write training text from (by `data=conversations`), and others to
measure on (a bench)."""

from __future__ import annotations

import json
import os
import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kangaroo.data.reading import Source, named_records
from kangaroo.models.prompts import mended
from kangaroo.utils.errors import DataError

TRAINING, HELD_OUT = "training.jsonl", "held_out.jsonl"
SHARED = 20  # words in a row: passages that questions share, rather than words that ask


@dataclass(frozen=True)
class Split:
    """Two lists with no question in common: records as their source has them, and questions of a
    bench; and how many questions are in neither, since they share a passage with the second."""

    training: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    left_out: int

    def write(self, folder: Path) -> None:
        """Both as files of JSON lines, whole or not at all; `mended`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, records in ((TRAINING, self.training), (HELD_OUT, self.held_out)):
            partial = folder / f"{name}.partial"
            lines = (mended(json.dumps(record, ensure_ascii=False)) for record in records)
            partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.replace(partial, folder / name)


def split(source: Source, held: int, seed: int, left_out: Counter[str] | None = None) -> Split:
    """Shuffle questions and hold some out of each task: a record's field `task` or `category`, or
    `all`. One that has `SHARED` words in a row in common with one that is held out is in neither
    list: many ask about the same passage. `left_out` is that of `kangaroo.data.reading.read`.

    Errors: `DataError` for a source that cannot be read, is empty, or has a task with no more than
    `held` questions.
    """
    questions = []
    for record, messages in named_records(source, left_out):
        turns = [m["content"] for m in messages if m["role"] == "user" and m["content"].strip()]
        if turns:
            questions.append((record, turns))
    if not questions:
        raise DataError(f"{source.path} holds no questions.")
    random.Random(seed).shuffle(questions)
    by_task = defaultdict(list)
    for record, turns in questions:
        task = mended(str(record.get("task") or record.get("category") or "all"))
        by_task[task].append((record, turns))
    for task, some in by_task.items():
        if len(some) <= held:
            raise DataError(
                f"task '{task}' of {source.path} has {len(some)} questions, and {held} were to be "
                f"held out. Pass held= below {len(some)}, or a file that has more."
            )
    held_out = [(task, turns) for task in sorted(by_task) for _, turns in by_task[task][:held]]
    passages = {run for _, turns in held_out for run in _runs(turns)}
    rest = [item for some in by_task.values() for item in some[held:]]
    random.Random(seed).shuffle(rest)
    training = [record for record, turns in rest if passages.isdisjoint(_runs(turns))]
    bench = [
        {"question_id": number, "category": task, "turns": turns}
        for number, (task, turns) in enumerate(held_out)
    ]
    return Split(training, bench, len(rest) - len(training))


def _runs(turns: list[str]) -> set[tuple[str, ...]]:
    texts = [turn.split() for turn in turns]
    return {tuple(ws[i : i + SHARED]) for ws in texts for i in range(len(ws) - SHARED + 1)}
