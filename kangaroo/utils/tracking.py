"""Experiment tracking by Weights & Biases. Only this module imports wandb, and only when used."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kangaroo.utils.errors import ConfigError, explained
from kangaroo.utils.folders import install
from kangaroo.utils.provenance import flatten

ID_FILE = "wandb_id"  # in a run's folder, its id in W&B; without it the next run is a new one
LONGEST_NAME = 128  # characters of a run's name, and of an artifact's
OFFLINE = "offline", "dryrun", "disabled"  # modes that need no key
MODES = "online", "run", "shared", *OFFLINE

log = logging.getLogger(__name__)


@dataclass
class NoTracker:
    """The tracker that does nothing, and the interface of all trackers."""

    name: str = "none"  # of the tracker

    def check(self) -> None:
        """Check, before any work, that a run could start. Errors: `ConfigError`."""

    def start(self, settings: dict[str, Any], output: Path) -> NoTracker:
        """Begin a run, or resume the one of the folder `output`."""
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Log the metrics of a step; steps ascend."""

    def result(self, metrics: dict[str, float], plots: Sequence[Path]) -> None:
        """Record the summary and the plots of the whole run."""

    def save(
        self, folder: Path, files: Sequence[Path], name: str, kind: str, metadata: dict[str, Any]
    ) -> None:
        """Upload files, by their names within `folder`, as a version of the artifact `name`, of a
        `kind` such as "adapter", with `metadata`."""

    def __enter__(self) -> NoTracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the run, as failed if there was an exception: sweeps depend on it."""


@contextmanager
def at_no_cost() -> Iterator[None]:
    """Log a failure in this context, and let the run go on: its results need no tracker."""
    try:
        yield
    except Exception as error:
        log.warning("W&B has failed, and the run goes on without it: %s", error)


@dataclass
class Wandb(NoTracker):
    """Weights & Biases. A run of a W&B sweep takes the sweep's project and entity."""

    name: str = "wandb"
    project: str = "kangaroo"  # of the run
    entity: str | None = None  # user or team; None takes your default one
    group: str | None = None  # shared by the runs of one sweep or comparison
    mode: str | None = None  # "online", or "offline" for `wandb sync`; None takes `$WANDB_MODE`

    def check(self) -> None:
        fix = f"{install('wandb')}, or logger=none."
        with explained(ConfigError, "logger=wandb needs the package wandb", fix, (ImportError,)):
            import wandb
        mode = self.mode or os.environ.get("WANDB_MODE", "online")
        if mode not in MODES:
            raise ConfigError(f"logger.mode={mode} is none of {', '.join(MODES)}.")
        has_key = mode in OFFLINE
        with suppress(Exception):  # of many kinds: no key and no terminal to ask, a wrong key
            has_key = has_key or wandb.login(verify=False)
        if not has_key:
            raise ConfigError(
                "logger=wandb finds no key. Call `wandb login`, set WANDB_API_KEY, or pass "
                "logger.mode=offline, whose runs `wandb sync` uploads later."
            )

    def start(self, settings: dict[str, Any], output: Path) -> Wandb:
        import wandb

        output.mkdir(parents=True, exist_ok=True)
        self.wandb = wandb
        file = output / ID_FILE
        name = os.environ.get("WANDB_NAME", "/".join(output.resolve().parts[-2:])[-LONGEST_NAME:])
        options: dict[str, Any] = {"dir": output, "mode": self.mode, "config": flatten(settings)}
        options |= {"name": name[:LONGEST_NAME], "group": self.group and self.group[:LONGEST_NAME]}
        if "WANDB_SWEEP_ID" not in os.environ:  # else the sweep's agent sets them
            if not file.exists():
                file.write_text(secrets.token_hex(4))
            options |= {"project": self.project, "entity": self.entity, "id": file.read_text()}
        try:
            self.run = wandb.init(resume="allow", **options)
        except Exception as error:  # no network, or a project that is not the user's
            log.warning("W&B refuses: %s. The run goes to %s, for `wandb sync`.", error, output)
            self.run = wandb.init(**options | {"mode": "offline", "id": None})  # the id is taken
        return self

    @at_no_cost()
    def log(self, metrics: dict[str, float], step: int) -> None:
        if step >= self.run.starting_step:  # W&B has the steps repeated since a checkpoint
            self.run.log(metrics, step=step)

    @at_no_cost()
    def result(self, metrics: dict[str, float], plots: Sequence[Path]) -> None:
        self.run.log({f"plots/{plot.stem}": self.wandb.Image(str(plot)) for plot in plots})
        # last, or the last step's metrics would replace the summary
        self.run.summary.update(metrics)

    @at_no_cost()
    def save(
        self, folder: Path, files: Sequence[Path], name: str, kind: str, metadata: dict[str, Any]
    ) -> None:
        # names of artifacts may hold letters, digits and these three characters
        name = re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)[:LONGEST_NAME]
        artifact = self.wandb.Artifact(name, kind, metadata=metadata)
        for file in files:
            artifact.add_file(str(file), name=file.relative_to(folder).as_posix())
        self.run.log_artifact(artifact)

    @at_no_cost()
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.run.finish(exit_code=int(kind is not None))
