"""What every command has: a typed config from Hydra, and errors that fit in one line."""

import functools
import gc
import itertools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

import hydra
import transformers
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kangaroo.cli.schema import CONFIGS
from kangaroo.drafters.base import DrafterConfig
from kangaroo.utils import ranges, ranks
from kangaroo.utils.errors import ConfigError, KangarooError
from kangaroo.utils.folders import sole_writer
from kangaroo.utils.ranks import Ranks
from kangaroo.utils.tracking import NoTracker, Wandb

STOPPED = 130  # the exit code of what Ctrl-C stops: 128 and the signal's number

log = logging.getLogger(__name__)

# read when `datasets` is imported, which only commands that need it wait for
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def command(
    shared: bool = False, goes_on: bool = False
) -> Callable[[Callable[[Any], float | None]], Callable[[], None]]:
    """A main function that takes the typed config of its name, and says what a user can fix in one
    line. What it returns is what a sweeper that searches (`hydra/sweeper=optuna`) goes by.

    Args:
        shared: several processes can share the work; else torchrun may start but one.
        goes_on: the same command goes on with what its output holds: two at a time would mix it.
    """

    def decorate(run: Callable[[Any], float | None]) -> Callable[[], None]:
        name = run.__name__
        ConfigStore.instance().store(name=f"{name}_schema", node=get_type_hints(run)["config"])

        @hydra.main(version_base="1.3", config_path=CONFIGS, config_name=name)
        def main(config: DictConfig) -> float | None:
            logging.captureWarnings(True)
            transformers.utils.logging.disable_progress_bar()
            rank, in_sweep = int(os.environ.get("RANK", 0)), sweep_folder() is not None
            end: BaseException
            try:
                if not shared:
                    ranks.check_alone()
                check_ranges(config)
                with sole_writer(Path(config.output), rank) if goes_on else nullcontext():
                    return run(OmegaConf.to_object(config))
            except KeyboardInterrupt:
                kept = " What is finished is kept: the same command goes on from there."
                if rank == 0:
                    sys.stderr.write(f"\nStopped.{kept if goes_on else ''}\n")
                end = SystemExit(STOPPED)
            except Exception as error:
                fixable = isinstance(error, KangarooError | MissingMandatoryValue)
                if not (fixable or in_sweep):
                    raise
                end = SystemExit(f"{type(error).__name__}: {error}")
                if in_sweep:  # Hydra goes on, and fails after the last job
                    log.error("this job failed: %s", end, exc_info=not fixable)
                    end = CompactHydraException(str(end))
            # beyond the handler, whose traceback holds the target: the next job needs its memory
            gc.collect()
            raise end

        return functools.wraps(run)(main)

    return decorate


def check_ranges(config: DictConfig, place: str = "") -> None:
    """Refuse numbers outside of their ranges by their place on the command line."""
    kind = OmegaConf.get_type(config)
    values = {str(k): config[k] for k in config if not OmegaConf.is_missing(config, k)}
    if kind is not None and is_dataclass(kind):
        ranges.check(kind, values, place)
    for name, value in values.items():
        if isinstance(value, DictConfig):
            check_ranges(value, f"{place}{name}.")


def sweep_folder() -> Path | None:
    """The folder of the sweep (`-m`) that this job is one of; None outside a sweep."""
    hydra_config = HydraConfig.get()
    return Path(hydra_config.sweep.dir) if hydra_config.mode is RunMode.MULTIRUN else None


def tracker_of(logger: NoTracker, model_name: str, ranks: Ranks) -> NoTracker:
    """The first process alone tracks. The jobs of a sweep (`-m`) lie in one group of W&B, if no
    other was asked for."""
    if isinstance(logger, Wandb) and logger.group is None and (sweep := sweep_folder()):
        logger.group = f"{model_name}-{sweep.name}"
    return logger if ranks.is_first else NoTracker()


def plain(config: Any) -> dict[str, Any]:
    """A command's config as plain JSON values."""
    values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return cast(dict[str, Any], values)


def varied(drafter: DrafterConfig, options: dict[str, list[Any]]) -> dict[str, DrafterConfig]:
    """A drafter with every combination of values of its options, by its name and these values.
    Errors: `ConfigError` for an option that it does not have, or a value that it does not take."""
    drafters = {}
    for values in itertools.product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        name = ",".join([drafter.name, *(f"{k}={v}" for k, v in chosen.items())])
        try:
            merged = OmegaConf.merge(OmegaConf.structured(drafter), chosen)
            drafters[name] = cast(DrafterConfig, OmegaConf.to_object(merged))
        except OmegaConfBaseException as error:
            problem = str(error).splitlines()[0]
            fault = f"variants={options} for drafter={drafter.name}: {problem}."
            raise ConfigError(fault) from error
    return drafters
