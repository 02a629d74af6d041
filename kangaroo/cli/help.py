"""Help on the command line: `--help` lists every option with its value, meaning and range, as the
configs' dataclasses say; an unknown name is answered with the nearest ones."""

import functools
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from kangaroo.cli.schema import CONFIGS
from kangaroo.utils.provenance import flatten
from kangaroo.utils.ranges import MOST, requirement

WIDTH = 80  # columns of a terminal
ENTRY = r"^ {4}([\w, ]+): (.*(?:\n {8}.*)*)"  # of a docstring's list of options
ROOTLESS = ("experiment", "recipe")  # groups that are no section of a config
HIDDEN = ("hardware", "hydra")  # not for users
COMMENT = r"^ {4}(\w+): [^#\n]*  # (.*)$"  # beside a field


def text(name: str, purpose: str, overrides: list[str]) -> str:
    """The help of a command, with the options of the parts that `overrides` choose."""
    title = textwrap.fill(" ".join(purpose.split()), WIDTH)
    entries = [f"{title}\n\nParts, chosen by group=name:\n"]
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        config = compose(name, overrides, return_hydra_config=True)
        for group, choice in config.hydra.runtime.choices.items():
            if "hydra" not in group and "@" not in group:
                options = GlobalHydra.instance().config_loader().get_group_options(group)
                entries.append(_entry(f"{group}={choice or 'null'}", ", ".join(_public(options))))
        entries += ["\nOptions, set by option=value:\n", *_options(config)]
    return "".join(entries)


@functools.cache
def meanings(kind: type) -> dict[str, str]:
    """What each option of a dataclass means, by its docstring or the comment beside the field."""
    texts: dict[str, str] = {}
    for part in filter(is_dataclass, reversed(kind.__mro__)):
        for options, meaning in re.findall(ENTRY, inspect.cleandoc(part.__doc__ or ""), re.M):
            texts |= dict.fromkeys(options.split(", "), " ".join(meaning.split()))
        texts |= dict(re.findall(COMMENT, inspect.getsource(part), re.M))
    return {option: re.sub(r"\bNone\b", "null", meaning) for option, meaning in texts.items()}


def explanation(error: CompactHydraException) -> str:
    """Hydra's error on a command line, in a few lines, with the nearest names there are."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        files = Path(CONFIGS, group).glob("*.yaml")
        names = sorted(file.stem for file in files) or _public(error.options)
        hint = f"{_nearest(choice, names)} There are {', '.join(names)}."
        typed = error.missing_cfg_file.replace("/", "=", 1)
        return f"ConfigError: there is no {typed}.{hint}"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.parent_node is not None:
        where = str(cause.full_key).removesuffix(str(cause.key))
        values: Any = OmegaConf.to_container(cause.parent_node)
        options = {name: value for name, value in values.items() if name not in HIDDEN}
        known = [where + name for name in [*flatten(options), *options]]
        hint = _nearest(str(cause.key), known if where else [*ROOTLESS, *known])
        if OmegaConf.get_type(cause.parent_node) is dict:
            hint += f" +{cause.full_key}= adds it."
        problem = f"there is no option '{cause.full_key}'."
        return f"ConfigError: {problem}{hint} --help lists them all."
    reason = f": {str(cause).splitlines()[0]}." if isinstance(cause, OmegaConfBaseException) else ""
    return f"{error}{reason}"


def nameless_choice(name: str, typed: list[str]) -> str | None:
    """What to say of a part of this command whose choice is no name but null, a number or a list;
    None where all are names."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(CONFIGS, version_base="1.3"):
        groups = compose(name, return_hydra_config=True).hydra.runtime.choices
    words = [word for word in typed if "=" in word and not word.startswith("-")]
    for override in OverridesParser.create().parse_overrides(words):
        group, value = override.key_or_group, override.value()
        if group not in groups or not (value is None or isinstance(value, int | float | list)):
            continue
        fix = f"~{group} leaves that part out, and --help lists the names it takes."
        if isinstance(value, list):
            fix = f"It takes one name; -m {group}={','.join(map(str, value))} takes each in turn."
        return f"ConfigError: {override.input_line} is no choice. {fix}"
    return None


def _public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.endswith("schema")]


def _nearest(word: str, names: list[str]) -> str:
    """A hint at the names whose last part is nearest to a word."""
    ends = {name: name.rpartition(".")[2] for name in names}
    nearest = get_close_matches(word, ends.values(), n=1)
    near = [repr(name) for name, end in ends.items() if end in nearest]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _options(config: DictConfig, prefix: str = "") -> Iterator[str]:
    kind: Any = OmegaConf.get_type(config)
    about = meanings(kind)
    hints = get_type_hints(kind, include_extras=True)
    values: Any = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    values.pop("hydra", None)
    parts = {}
    for name, raw in values.items():
        if isinstance(raw, dict) and is_dataclass(OmegaConf.get_type(config, name)):
            parts[name] = config[name]
            continue
        takes = requirement(hints.get(name)).replace(f" and at most {MOST}", "")
        meaning = about.get(name, "") + f" ({takes})" * bool(takes)
        yield _entry(f"{prefix}{name}={_shown(config, name, raw)}", meaning)
    for name, part in parts.items():
        yield from _options(part, f"{prefix}{name}.")


def _shown(config: DictConfig, name: str, raw: Any) -> str:
    """An option's value as it is written on the command line; empty where it has to be given."""
    if isinstance(raw, dict) or raw == "???":
        return ""
    if "${" in str(raw):
        with suppress(OmegaConfBaseException, ValueError):  # some are known when the command runs
            raw = config[name]
    return {"None": "null", "True": "true", "False": "false"}.get(str(raw), str(raw))


def _entry(head: str, meaning: str) -> str:
    lines = textwrap.wrap(head, WIDTH, initial_indent="  ", subsequent_indent="    ")
    lines += textwrap.wrap(meaning, WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "".join(f"{line}\n" for line in lines)
