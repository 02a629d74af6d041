"""Where metrics and results go besides the files of a run: nowhere, or Weights & Biases.

The only module that imports wandb, and only when it is asked for.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from kangaroo.errors import ConfigError


class Tracker(Protocol):
    """Takes metrics by name, and folders."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Metrics of a step; steps ascend."""
        ...

    def save(self, folder: Path, name: str, kind: str, about: dict[str, Any]) -> None:
        """Keep a folder's files as version of what `name` names.

        Args:
            kind: such as "adapter".
            about: what a reader wants to know before fetching it.
        """
        ...

    def finish(self) -> None:
        """The run has ended, well or not."""
        ...


class NoTracker:
    """For runs whose files are enough."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        pass

    def save(self, folder: Path, name: str, kind: str, about: dict[str, Any]) -> None:
        pass

    def finish(self) -> None:
        pass


@dataclass
class NoTrackerConfig:
    """Tracks nothing."""

    name: str = "none"

    def start(self, settings: dict[str, Any], output: Path) -> NoTracker:
        """What takes metrics and keeps none."""
        return NoTracker()


# what wandb takes; it refuses another mode itself
Mode = Literal["online", "offline", "disabled", "shared"]


@dataclass
class WandbConfig:
    """Weights & Biases.

    Args:
        mode: "online", or "offline" to keep the run in `output` and sync it later (`wandb sync`).
        group: runs of one sweep or comparison share it.
    """

    name: str = "wandb"
    project: str = "kangaroo"
    entity: str | None = None
    group: str | None = None
    mode: str = "online"

    def start(self, settings: dict[str, Any], output: Path) -> Wandb:
        """Start a run, or go on with the one that `output` belongs to."""
        return Wandb(self, settings, output)


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, config: WandbConfig, settings: dict[str, Any], output: Path):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "logger=wandb needs the package wandb: pip install kangaroo[wandb], or logger=none."
            ) from error
        output.mkdir(parents=True, exist_ok=True)
        known = output / "wandb_id"
        if not known.exists():
            known.write_text(secrets.token_hex(4))
        self.artifact = wandb.Artifact
        self.run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            mode=cast(Mode, config.mode),
            dir=output,
            config=settings,
            id=known.read_text(),
            resume="allow",
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Steps done again since the last checkpoint are known there, with the same values; W&B
        would warn of each that it does not go back.
        """
        if step >= self.run.starting_step:
            self.run.log(metrics, step=step)

    def save(self, folder: Path, name: str, kind: str, about: dict[str, Any]) -> None:
        # its names may hold letters, digits and these three
        artifact = self.artifact(
            re.sub(r"[^\w.-]", "-", name, flags=re.ASCII), kind, metadata=about
        )
        artifact.add_dir(str(folder))
        self.run.log_artifact(artifact)

    def finish(self) -> None:
        self.run.finish()
