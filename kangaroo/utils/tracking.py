"""Where metrics and results go besides the files of a run: nowhere, or Weights & Biases.

The only module that imports wandb, and only when it is asked for.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import install
from kangaroo.utils.provenance import flat

ID = "wandb_id"  # of a run, a file in its folder
NAME = 128  # characters that a run's name may have


@dataclass
class NoTracker:
    """For runs whose files are enough; others take metrics by name, plots and files."""

    name: str = "none"

    def start(self, settings: dict[str, Any], output: Path) -> NoTracker:
        """Begin a run, or go on with that which `output` belongs to."""
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Metrics of a step; steps ascend."""

    def result(self, metrics: dict[str, float], plots: Sequence[Path]) -> None:
        """What stands for the whole run."""

    def save(
        self, folder: Path, files: Sequence[Path], name: str, kind: str, about: dict[str, Any]
    ) -> None:
        """Keep files, by their names within `folder`, as a version of what `name` names; `kind` is
        such as "adapter", and `about` what a reader wants to know before fetching it."""

    def __enter__(self) -> NoTracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The run has ended, or failed: a search has to know."""


def forget(output: Path) -> None:
    """What `output` holds is measured anew: a run of its own in W&B, too."""
    (output / ID).unlink(missing_ok=True)


@dataclass
class Wandb(NoTracker):
    """Weights & Biases.

    Args:
        project, entity: where it is kept; a run of a W&B sweep is kept where the sweep is.
        group: runs of one sweep or comparison share it.
        mode: "online", or "offline", which `wandb sync` sends later; None takes `$WANDB_MODE`.
    """

    name: str = "wandb"
    project: str = "kangaroo"
    entity: str | None = None
    group: str | None = None
    mode: str | None = None

    def start(self, settings: dict[str, Any], output: Path) -> Wandb:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"logger=wandb needs the package wandb: {install('wandb')}, or logger=none."
            ) from error
        output.mkdir(parents=True, exist_ok=True)
        self.wandb, file = wandb, output / ID
        place: dict[str, Any] = {"dir": output, "group": self.group, "mode": self.mode}
        if "WANDB_SWEEP_ID" not in os.environ:  # else the sweep's agent says where, and which run
            if not file.exists():
                file.write_text(secrets.token_hex(4))
            place |= {"project": self.project, "entity": self.entity, "id": file.read_text()}
        name = os.environ.get("WANDB_NAME", "/".join(output.resolve().parts[-2:])[-NAME:])
        self.run = wandb.init(name=name, config=flat(settings), resume="allow", **place)
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        if step >= self.run.starting_step:  # W&B has those done again since a checkpoint
            self.run.log(metrics, step=step)

    def result(self, metrics: dict[str, float], plots: Sequence[Path]) -> None:
        self.run.log({f"plots/{plot.stem}": self.wandb.Image(str(plot)) for plot in plots})
        # after the last step has been written, or that would count as the run's result
        self.run.summary.update(metrics)

    def save(
        self, folder: Path, files: Sequence[Path], name: str, kind: str, about: dict[str, Any]
    ) -> None:
        # its names may hold letters, digits and these three
        name = re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)
        artifact = self.wandb.Artifact(name, kind, metadata=about)
        for file in files:
            artifact.add_file(str(file), name=file.relative_to(folder).as_posix())
        self.run.log_artifact(artifact)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.run.finish(exit_code=int(kind is not None))
