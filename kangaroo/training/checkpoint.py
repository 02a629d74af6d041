"""A training run's state on disk: whole or not there, so that kill -9 loses little."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from kangaroo.utils.errors import CorruptFile

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


def load(folder: Path) -> dict[str, Any]:
    """What `save` wrote in a folder, by name; empty where it did not. Errors: `CorruptFile`."""
    path = folder / CHECKPOINT
    try:
        return torch.load(path, weights_only=True) if path.exists() else {}
    except (RuntimeError, EOFError, OSError) as error:
        raise CorruptFile(
            f"checkpoint '{path}' cannot be read ({error}); delete it to train anew."
        ) from error


def save(
    folder: Path, identity: dict[str, Any], backend: dict[str, Any], progress: Progress
) -> None:
    """Write the settings and data of a run, its backend's `state()` and its progress beside those
    written last, then put them in their place."""
    path = folder / CHECKPOINT
    part = path.with_suffix(".part")
    torch.save({"identity": identity, "backend": backend, "progress": asdict(progress)}, part)
    os.replace(part, path)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of every step; a last line that is still being written is left out."""
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
