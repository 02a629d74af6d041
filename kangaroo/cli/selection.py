"""What `model=` takes on every command line: whatever `kangaroo.load` takes.

`model` is a group of Hydra, whose choices are the sections of `configs/groups/model.yaml`. Here
alone a folder or a hub id becomes a choice too, before Hydra reads the command line: a section of
its own, called by its last part, with the paper's recipe. So results, folders and adapters have
that name, in sweeps (`-m model=a,b`) and in every process of torchrun alike.
"""

import re
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from kangaroo.models.loading import known_model, model_config
from kangaroo.utils.errors import ConfigError


def select_models(words: list[str]) -> list[str]:
    """The words of a command line, with the path in `model=` replaced by a choice; a `model.path=`
    without `model=` is such a word. Errors: `ConfigError` for two models of one name."""
    is_named = any(word.startswith("model=") for word in words)
    selecting = "model=" if is_named else "model.path="
    paths: dict[str, str] = {}  # by name
    return [_selected(x, paths) if x.startswith(selecting) else x for x in words]


def add_model(name: str, section: dict[str, Any]) -> None:
    """Add a choice of `model=`, with its recipe for `train.py`: `train` of its section, by default
    the paper's."""
    store, settings = ConfigStore.instance().store, dict(section)
    train = settings.pop("train", {"defaults": ["paper"]})
    store(group="recipe", name=name, node=train, package="_global_")
    store(group="model", name=name, node={"defaults": ["schema"], "name": name, **settings})


def _selected(word: str, paths: dict[str, str]) -> str:
    key, _, value = word.partition("=")
    choices, is_one = [], Path(value).expanduser().exists()
    for model in [value] if is_one else value.split(","):
        try:
            config = model_config(model.strip("\"'"))
        except ConfigError:
            if key == "model":  # perhaps a choice of the user's own --config-dir
                return word
            raise
        if paths.setdefault(config.name, config.path) != config.path:
            raise ConfigError(
                f"'{paths[config.name]}' and '{config.path}' are both called '{config.name}', and "
                "so would their results be. Run them one by one, with model.name= for one."
            )
        if known_model(config.path) is None:
            add_model(config.name, {"path": config.path})
        is_plain = re.fullmatch(r"[A-Za-z_][\w.+-]*", config.name, re.ASCII)
        choices.append(config.name if is_plain else f'"{config.name}"')
    return f"model={','.join(choices)}"
