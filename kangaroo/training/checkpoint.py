"""A training run's state on disk: whole or not there, so that kill -9 loses little."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kangaroo.utils.errors import ConfigError, CorruptFile
from kangaroo.utils.provenance import changes

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"


@dataclass
class Progress:
    """How far a run has come, and its last results, by name."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # read by the target
    assistant_tokens: int = 0  # positions that entered the loss
    seconds: float = 0.0  # of the optimizer steps, on the machine's clock
    held_out: dict[str, float] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each adapter's drafter
    decoded: dict[str, float] = field(default_factory=dict)


class Checkpoint:
    """Weights, moments, progress and metrics (one JSON line a step) of a run, in one folder, which
    one process reads and writes. One begun with other settings or data (a fingerprint) is refused.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], data: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / CHECKPOINT
        self.identity = json.loads(json.dumps(settings | {"data": data}))

    def resume(self) -> tuple[Progress, dict[str, Any] | None]:
        """The last checkpoint's progress and a backend's `state()`; None where there is none."""
        progress, backend = Progress(), None
        if self.path.exists():
            state = _read(self.path)
            if changed := changes(state["identity"], self.identity):
                raise ConfigError(
                    f"'{self.folder}' holds a run with other settings ({changed}). Go on with the "
                    "same ones, pass output= another folder, or delete it."
                )
            progress, backend = Progress(**state["progress"]), state["backend"]
        # steps that will be done again are dropped, and a torn last line
        rows = [row for row in read_metrics(self.folder) if row["step"] <= progress.step]
        (self.folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return progress, backend

    def save(self, backend: dict[str, Any], progress: Progress) -> None:
        """Write the state beside the last one, then put it in its place."""
        part = self.path.with_suffix(".part")
        state = {"identity": self.identity, "backend": backend, "progress": asdict(progress)}
        torch.save(state, part)
        os.replace(part, self.path)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append a step's metrics as a line of JSON."""
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps({"step": step} | metrics) + "\n")


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of every step; a last line that is still being written is left out."""
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def begun_with(folder: Path) -> dict[str, Any]:
    """The settings that the run in `folder` began with; none where there is no checkpoint."""
    path = folder / CHECKPOINT
    # mapped, since of a file of many GB this reads a few lines
    return _read(path, mmap=True)["identity"] if path.exists() else {}


def _read(path: Path, mmap: bool = False) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, mmap=mmap)
    except (RuntimeError, EOFError, OSError) as error:
        raise CorruptFile(
            f"checkpoint '{path}' cannot be read ({error}); delete it to train anew."
        ) from error
    return state
