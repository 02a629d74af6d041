"""What every command has: a typed config from Hydra, and errors that fit in one line."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_type_hints

import hydra
import transformers
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kangaroo.cli.schema import CHOICES, CONFIGS, RENAMED, register, register_command, sections
from kangaroo.drafters.base import DrafterConfig
from kangaroo.utils import ranges, ranks
from kangaroo.utils.errors import ConfigError, KangarooError
from kangaroo.utils.folders import install, sole_writer
from kangaroo.utils.ranks import Ranks
from kangaroo.utils.tracking import NoTrackerConfig, WandbConfig

STOPPED = 130  # the exit code of what Ctrl-C stops: 128 and the signal's number

log = logging.getLogger(__name__)

HELP = """{program}: every setting, with what it is if nothing is said.

== Groups of settings (GROUP=CHOICE) ==

{groups}

== Settings (NAME=VALUE) ==

$CONFIG"""


def help_text() -> str:
    """What `--help` says: groups and choices are those that are stored, and the files of configs/.
    Hydra's own text would list the types of settings among them.
    """
    choices: dict[str, list[str]] = {}
    for file in sorted(Path(CONFIGS, "groups").glob("*.yaml")):
        choices[file.stem] = list(sections(f"groups/{file.name}"))
    for group in ("logger", "trainer"):
        choices[group] = list(CHOICES[group])
    for file in sorted(Path(CONFIGS).glob("*/**/*.yaml")):
        choices.setdefault(file.parent.relative_to(CONFIGS).as_posix(), []).append(file.stem)
    for others in ("groups", "sweep"):  # the former are above, the latter are W&B's
        del choices[others]
    lines = [f"{group}: {', '.join(names)}" for group, names in sorted(choices.items())]
    return HELP.format(program=Path(sys.argv[0]).name, groups="\n".join(lines))


def sweeper_of_extra(name: str) -> str:
    """A sweeper that an extra of the same name brings. Without it, say so and end: Hydra shows no
    exception of a resolver.
    """
    try:
        find_spec(f"hydra_plugins.hydra_{name}_sweeper.config")
    except ModuleNotFoundError as error:  # of the package above it
        raise SystemExit(
            f"MissingPackage: +search={name} needs its extra: {install(name)}."
        ) from error
    return name


register()
OmegaConf.register_new_resolver("help", help_text, replace=True)
OmegaConf.register_new_resolver("sweeper_of_extra", sweeper_of_extra, replace=True)

# read when `datasets` is imported, which only commands that need it wait for
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def command(
    config_name: str, shared: bool = False, goes_on: bool = False, keeps: bool = False
) -> Callable[[Callable[[Any], float | None]], Callable[[], None]]:
    """A main function that takes its typed config, and says what a user can fix in one line. What
    it returns is what a sweeper that searches (`hydra/sweeper=optuna`) goes by.

    Args:
        config_name: of the file in `configs/`, or COMMAND_ACTION of a section in COMMAND's.
        shared: several processes can share the work; else torchrun may start but one.
        goes_on: what it writes to its output is gone on with by the same command: two at a time
            would mix what they write.
        keeps: what it has finished elsewhere is not done again, either.
    """

    def decorate(run: Callable[[Any], float | None]) -> Callable[[], None]:
        register_command(get_type_hints(run)["config"])

        @hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)
        def main(config: DictConfig) -> float | None:
            logging.captureWarnings(True)
            transformers.utils.logging.disable_progress_bar()
            rank, in_sweep = int(os.environ.get("RANK", 0)), sweep_folder() is not None
            result, failure, stopped = None, None, False
            try:
                if not shared:
                    ranks.check_alone()
                check_ranges(config)
                with sole_writer(Path(config.output), rank) if goes_on else nullcontext():
                    result = run(OmegaConf.to_object(config))
            except KeyboardInterrupt:
                stopped = True
            except Exception as error:
                fixable = isinstance(error, KangarooError | MissingMandatoryValue)
                if not (fixable or in_sweep):
                    raise
                failure = f"{type(error).__name__}: {error}"
                if in_sweep:
                    log.error("this job failed: %s", failure, exc_info=not fixable)
            # beyond the handler, whose traceback holds the target: the next job needs its memory
            gc.collect()
            if stopped:
                if rank == 0:
                    kept = " What is finished is kept: the same command goes on from there."
                    sys.stderr.write(f"\nStopped.{kept if goes_on or keeps else ''}\n")
                raise SystemExit(STOPPED)
            if failure is not None and in_sweep:
                raise CompactHydraException(failure)  # Hydra goes on, and fails after the last job
            if failure is not None:
                raise SystemExit(failure)
            return result

        @functools.wraps(run)
        def checked() -> None:
            check_names(config_name)
            main()

        return checked

    return decorate


def check_names(config_name: str) -> None:
    """End where an option is given by the name that it once had, and say which it has now."""
    for word in sys.argv[1:]:
        old = word.partition("=")[0].lstrip("+")
        if new := RENAMED.get(config_name, {}).get(old):
            raise SystemExit(f"Could not override '{old}': there is no such option; it is '{new}'.")


def with_actions(name: str, actions: Mapping[str, Callable[[], None]]) -> Callable[[], None]:
    """A command whose first word says what it does; the rest is that action's own."""
    width = max(map(len, actions))
    about = {action: (run.__doc__ or "").partition("\n")[0] for action, run in actions.items()}
    lines = [f"  {action:{width}}  {text}\n" for action, text in about.items()]

    def main() -> None:
        """Do what the first word says."""
        program = Path(sys.argv[0]).name
        action, *rest = sys.argv[1:] or ["--help"]
        if action in ("-h", "--help"):
            sys.stdout.write(f"usage: {program} ACTION [option=value ...]\n\n{''.join(lines)}")
            sys.stdout.write(f"\n`{program} ACTION --help` lists an action's options.\n")
            return
        if action not in actions:
            near = get_close_matches(action, actions, n=1)
            hint = f"Did you mean '{near[0]}'? " if near else ""
            raise SystemExit(f"{name} does not do '{action}'. {hint}It does {', '.join(actions)}.")
        sys.argv = [f"{sys.argv[0]} {action}", *rest]  # what Hydra reads, and what results name
        actions[action]()

    return main


def check_ranges(config: DictConfig, place: str = "") -> None:
    """Refuse numbers outside of their ranges by their place on the command line.

    Errors: `ConfigError`.
    """
    kind = OmegaConf.get_type(config)
    names = [name for name in config if not OmegaConf.is_missing(config, name)]
    there = {str(name): config[name] for name in names}
    if kind is not None and is_dataclass(kind):
        ranges.check(kind, there, place)
    for name, value in there.items():
        if isinstance(value, DictConfig):
            check_ranges(value, f"{place}{name}.")


def sweep_folder() -> Path | None:
    """The folder of the sweep (`-m`) that this job is one of; None outside a sweep."""
    hydra_config = HydraConfig.get()
    return Path(hydra_config.sweep.dir) if hydra_config.mode is RunMode.MULTIRUN else None


def in_group(logger: WandbConfig | NoTrackerConfig, model_name: str) -> None:
    """The jobs of a sweep (`-m`) lie in one group of W&B, if no other was asked for."""
    if isinstance(logger, WandbConfig) and logger.group is None:
        sweep = sweep_folder()
        logger.group = None if sweep is None else f"{model_name}-{sweep.name}"


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process among those that torchrun started; what the log says, the first one says."""
    with ranks.join() as joined_ranks:
        if not joined_ranks.is_first:
            logging.disable(logging.INFO)
        yield joined_ranks


def plain(config: Any) -> dict[str, Any]:
    """A command's config as plain JSON values."""
    values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def varied(drafter: DrafterConfig, options: dict[str, list[Any]]) -> dict[str, DrafterConfig]:
    """A drafter with every combination of values of its options, by its name and these values.

    Errors: `ConfigError` for an option that it does not have, or a value of another type.
    """
    if not options:
        return {drafter.name: drafter}
    drafters = {}
    for values in itertools.product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        name = ",".join([drafter.name, *(f"{k}={v}" for k, v in chosen.items())])
        try:
            merged = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(drafter), chosen))
            check_ranges(merged, "drafter.")
            drafters[name] = cast(DrafterConfig, OmegaConf.to_object(merged))
        except OmegaConfBaseException as error:
            problem = str(error).splitlines()[0]
            raise ConfigError(
                f"variants={options} for drafter={drafter.name}: {problem}."
            ) from error
    return drafters
