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
    """How far a run has come.

    Args:
        step: optimizer steps done.
        tokens: tokens that the frozen target has read.
        assistant_tokens: positions that entered the loss.
        seconds: of the optimizer steps, on the machine's clock.
        held_out: results of the last held-out evaluation.
        facts: what drafters have to know, by adapter, from that evaluation.
        decoded: results of the last decoding of held-out prompts.
    """

    step: int = 0
    tokens: int = 0
    assistant_tokens: int = 0
    seconds: float = 0.0
    held_out: dict[str, float] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    decoded: dict[str, float] = field(default_factory=dict)


class Checkpoint:
    """Weights, moments, progress and metrics (one JSON line a step) of a run, in one folder.

    The state is whole whatever number of processes wrote it; one of them reads and writes.

    Args:
        settings: what the run was asked to do; a folder begun with other settings is refused.
        data: fingerprint of the training data.
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
            changed = changes(state["identity"], self.identity)
            if changed:
                raise ConfigError(
                    f"'{self.folder}' holds a run with other settings ({changed}). Go on with the "
                    "same ones, pass output= another folder, or delete it."
                )
            progress, backend = Progress(**state["progress"]), state["backend"]
        self._forget_metrics_after(progress.step)
        return progress, backend

    def save(self, backend: dict[str, Any], progress: Progress) -> None:
        """Write the state beside the last one, then put it in its place."""
        state = {
            "identity": self.identity,
            "backend": backend,
            "progress": asdict(progress),
        }
        part = self.path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, self.path)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append a step's metrics as a line of JSON."""
        with (self.folder / METRICS).open("a") as file:
            file.write(json.dumps({"step": step} | metrics) + "\n")

    def _forget_metrics_after(self, step: int) -> None:
        """Drop the lines of steps that will be done again, a torn last line included."""
        path = self.folder / METRICS
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [line for line in lines if line.endswith("}")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        path.write_text("".join(line + "\n" for line in kept))


def begun_with(folder: Path) -> dict[str, Any]:
    """The settings that the run in `folder` began with; none where there is no checkpoint."""
    path = folder / CHECKPOINT
    # mapped, since of a file of many GB this reads a few lines
    return _read(path, mmap=True)["identity"] if path.exists() else {}


def _read(path: Path, mmap: bool = False) -> dict[str, Any]:
    try:
        return torch.load(path, weights_only=True, mmap=mmap)
    except (RuntimeError, EOFError, OSError) as error:
        raise CorruptFile(
            f"checkpoint '{path}' cannot be read ({error}); delete it to train anew."
        ) from error
