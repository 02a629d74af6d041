"""The base of all commands: typed configs from Hydra, and errors in one line."""

import errno
import functools
import gc
import inspect
import itertools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

import hydra
import torch
import transformers
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

from kangaroo.api import build
from kangaroo.cli.help import explanation, nameless_choice
from kangaroo.cli.help import text as help_text
from kangaroo.cli.schema import CONFIGS, select_models
from kangaroo.drafters.base import DrafterConfig
from kangaroo.utils import ranges, ranks
from kangaroo.utils.errors import ConfigError, KangarooError, naming
from kangaroo.utils.folders import sole_writer
from kangaroo.utils.ranks import Ranks
from kangaroo.utils.tracking import NoTracker, Wandb

MISPLACED = errno.ENOTDIR, errno.EISDIR, errno.EEXIST  # a file in a folder's place, or otherwise
NAMELESS = "Config group override", "is not iterable", "Merge error"  # Hydra's, of such choices
INTERRUPTED = 130  # the exit code after Ctrl-C: 128 plus the signal's number

log = logging.getLogger(__name__)

# read by `datasets`, which only some commands import
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
# read by Hydra, whose errors `explanation` shortens; 0 is for those who want Hydra's own
os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def command(
    shared: bool = False, resumable: bool = False
) -> Callable[[Callable[[Any], float | None]], Callable[[], None]]:
    """A decorator for the main function of a command, which has its config's name. Errors that a
    user can fix take one line. A search (`hydra/sweeper=optuna`) optimizes the returned value.

    Args:
        shared: several processes of torchrun share the work.
        resumable: the command resumes what its output folder holds, so only one may write there.
    """

    def decorate(run: Callable[[Any], float | None]) -> Callable[[], None]:
        name = run.__name__
        typed = list[str]()
        ConfigStore.instance().store(name=f"{name}_schema", node=get_type_hints(run)["config"])

        @hydra.main(version_base="1.3", config_path=CONFIGS, config_name=name)
        def main(config: DictConfig) -> float | None:
            sys.argv = typed  # which results record as their command
            return run_job(run, config, shared=shared, resumable=resumable)

        @functools.wraps(run)
        def start() -> None:
            typed[:] = sys.argv
            try:
                # Hydra's parser takes overrides in one piece, and none after an option between them
                sys.argv = [*typed[:1], *sorted(select_models(typed[1:]), key=is_override)]
                if not {"-h", "--help"} & {*typed}:
                    return main()
                overrides = [word for word in sys.argv[1:] if not word.startswith("-")]
                sys.stdout.write(help_text(name, inspect.getdoc(run) or "", overrides))
            except ConfigError as error:
                raise SystemExit(f"ConfigError: {error}") from error
            except (CompactHydraException, TypeError, ValueError) as error:
                is_nameless = any(text in str(error) for text in NAMELESS)
                message = nameless_choice(name, typed) if is_nameless else None
                if message is None and isinstance(error, CompactHydraException):
                    message = explanation(error)
                if message is None:
                    raise
                raise SystemExit(message) from error

        return start

    return decorate


def run_job(
    run: Callable[[Any], float | None], config: DictConfig, *, shared: bool, resumable: bool
) -> float | None:
    """Run a command once. What a user can fix ends it with one line; in a sweep every fault does,
    since the next job follows."""
    logging.captureWarnings(True)
    transformers.utils.logging.disable_progress_bar()
    rank = int(os.environ.get("RANK", 0))
    in_sweep = sweep_folder() is not None
    end: BaseException
    try:
        if not shared:
            ranks.check_alone()
        check_ranges(config)
        with sole_writer(Path(config.output), rank) if resumable else nullcontext():
            return run(OmegaConf.to_object(config))
    except KeyboardInterrupt:
        advice = " What is finished is kept: the same command goes on from there."
        if rank == 0:
            sys.stderr.write(f"\nStopped.{advice if resumable else ''}\n")
        end = SystemExit(INTERRUPTED)
    except Exception as error:
        fix = remedy(error)
        if fix is None and not in_sweep:
            raise
        end = SystemExit(f"{type(error).__name__}: {error}{fix or ''}")
        if in_sweep:  # Hydra continues, and fails after the last job
            log.error("this job failed: %s", end, exc_info=fix is None)
            end = CompactHydraException(str(end))
    # outside the handler, whose traceback holds the target: the next job needs its memory
    gc.collect()
    raise end


def is_override(word: str) -> bool:
    """Whether a word of the command line sets, adds or removes something in the config."""
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def remedy(error: Exception) -> str | None:
    """What a user can do about an error, unless its message says so; None for a fault of ours."""
    if isinstance(error, KangarooError | MissingMandatoryValue):
        return ""
    code = getattr(error, "errno", None)
    if code in (errno.ENOSPC, errno.EDQUOT):
        return ". Free some space, and run the same command again."
    if code in (errno.EACCES, errno.EPERM, errno.EROFS, *MISPLACED):
        return ". Pass another path."
    is_full = isinstance(error, MemoryError | torch.OutOfMemoryError) or code == errno.ENOMEM
    if is_full or "DefaultCPUAllocator" in str(error):  # torch's, for a CPU a mere RuntimeError
        return ". Free memory, or use less: fewer texts at a time, shorter ones, a smaller dtype."
    return None


def check_ranges(config: DictConfig, prefix: str = "") -> None:
    """Refuse numbers outside their ranges, and options that `+` has added, by their names on the
    command line."""
    kind = OmegaConf.get_type(config)
    values = {str(k): config[k] for k in config if not OmegaConf.is_missing(config, k)}
    if kind is not None and is_dataclass(kind):
        for name in values.keys() - {option.name for option in fields(kind)}:
            raise ConfigError(f"+{prefix}{name}: there is no such option. Leave it out.")
        ranges.check(kind, values, prefix)
    for name, value in values.items():
        if isinstance(value, DictConfig):
            check_ranges(value, f"{prefix}{name}.")


def sweep_folder() -> Path | None:
    """The folder of this job's sweep (`-m`); None outside a sweep."""
    hydra_config = HydraConfig.get()
    return Path(hydra_config.sweep.dir) if hydra_config.mode is RunMode.MULTIRUN else None


def select_tracker(logger: NoTracker, model_name: str, ranks: Ranks) -> NoTracker:
    """The tracker of this process: the first one's. By default, W&B groups the jobs of a sweep.
    Errors: `ConfigError` where it could not start."""
    if isinstance(logger, Wandb) and logger.group is None and (sweep := sweep_folder()):
        logger.group = f"{model_name}-{sweep.name}"
    tracker = logger if ranks.is_first else NoTracker()
    tracker.check()
    return tracker


def plain(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return cast(dict[str, Any], values)


def combinations(
    drafter: DrafterConfig, options: dict[str, list[Any]], where: str
) -> dict[str, DrafterConfig]:
    """The drafter with every combination of these options' values, by its name and the values.
    Errors: `ConfigError` for an option or a value that the drafter does not take; it begins with
    `where` they were given."""
    drafters = {}
    with naming(where):
        if missing := [option for option, values in options.items() if not values]:
            raise ConfigError(f"no {missing[0]} to try for drafter={drafter.name}.")
        for values in itertools.product(*options.values()):
            settings = dict(zip(options, values, strict=True))
            name = ",".join([drafter.name, *(f"{k}={v}" for k, v in settings.items())])
            drafters[name] = build(type(drafter), vars(drafter) | settings)
    return drafters
