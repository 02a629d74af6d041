"""The configs of all commands as dataclasses. As Hydra's types they refuse misspelt keys and values
of a wrong type before anything is loaded."""

import os
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from kangaroo.api import hardware_here
from kangaroo.chat import ChatConfig
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.making import MixConfig, SynthesisConfig
from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.layer_search import SearchConfig
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.bench import BenchConfig, bench_name
from kangaroo.evaluation.run import EvaluateConfig
from kangaroo.evaluation.speed import SpeedConfig
from kangaroo.evaluation.study.study import StudyConfig
from kangaroo.evaluation.tune import TuneConfig
from kangaroo.heads.adapter_files import adapters_of
from kangaroo.heads.base import HeadConfig
from kangaroo.models.loading import ModelConfig, known_model, model_config
from kangaroo.serving.serve import ServeConfig
from kangaroo.training.recipe import AdapterRecipe, TrainerConfig
from kangaroo.utils.discovery import classes
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import fitting_name, overrides_suffix, project_folder
from kangaroo.utils.ranges import Count, Ranged, Seed
from kangaroo.utils.tracking import NoTracker, Wandb

CONFIGS = str(project_folder("configs"))
# Small models with the vocabulary of a model family, for drafter=draft_model.
DRAFT_MODELS = {"vicuna": "double7/vicuna-68m", "llama-2": "JackFram/llama-68m"}


@dataclass
class TrainCommand:
    """`train.py`: a target, its data, the recipes and the logger."""

    model: ModelConfig = MISSING
    data: Any = MISSING
    adapter: AdapterRecipe = MISSING
    more: dict[str, AdapterRecipe] = field(default_factory=dict)  # trained in the same pass
    trainer: TrainerConfig = MISSING
    logger: Any = MISSING
    output: str = MISSING  # folder of adapters; a run that was stopped goes on there
    estimate: bool = False  # only log the needed time and memory, and whether they fit

    @property
    def recipes(self) -> list[AdapterRecipe]:
        """The recipes of all adapters of the run."""
        return [self.adapter, *self.more.values()]


@dataclass
class DraftingCommand:
    """The fields of commands that decode with a drafter."""

    model: ModelConfig = MISSING
    drafter: Any = MISSING
    hardware: dict[str, dict[str, Any]] = field(default_factory=dict)  # sizes by drafter, option


@dataclass
class EvaluateCommand(DraftingCommand, EvaluateConfig):
    """`evaluate.py`: a target, drafters and a bench; or a page of finished results."""

    variants: dict[str, list[Any]] = field(default_factory=dict)  # values of the drafter's options
    more: dict[str, Any] = field(default_factory=dict)  # drafters that answer the same questions
    logger: Any = MISSING
    study: StudyConfig | None = None  # summarizes the results in a table and a plot
    results: str | None = None  # a folder of finished results to report again
    page: str | None = None  # the Markdown page that reports them


@dataclass
class SpeedCommand(DraftingCommand):
    """`scripts/speed.py`: decoding speed against the memory's limit."""

    speed: SpeedConfig = field(default_factory=SpeedConfig)
    output: str = MISSING  # folder of the report


@dataclass
class ChatCommand(DraftingCommand):
    """`scripts/chat.py`: a target, a drafter and how to sample."""

    sampling: Sampling = field(default_factory=Sampling)
    chat: ChatConfig = field(default_factory=ChatConfig)


@dataclass
class ServeCommand(DraftingCommand, ServeConfig):
    """`scripts/serve.py`: a target and a drafter for many requests at a time."""


@dataclass
class TuneCommand(DraftingCommand, TuneConfig):
    """`scripts/tune.py`: a search for the fastest drafter; `drafter` is the current one."""

    more: dict[str, Any] = field(default_factory=dict)  # other drafters to try
    search: dict[str, dict[str, list[Any]]] = field(default_factory=dict)  # options by drafter


@dataclass
class DatastoreCommand:
    """`scripts/prepare.py datastore`: documents in which drafters look continuations up."""

    model: ModelConfig = MISSING
    data: Any = None  # a dataset; '~data' on the command line leaves it out
    texts: list[str] = field(default_factory=list)  # files, each a document
    output: str = MISSING  # folder of the datastore


@dataclass
class LayersCommand:
    """`scripts/prepare.py layers`: a search for layers that drafting may skip."""

    model: ModelConfig = MISSING
    data: Any = MISSING
    search: SearchConfig = field(default_factory=SearchConfig)
    output: str = MISSING  # file of the found layers


@dataclass
class SplitCommand(Ranged):
    """`scripts/prepare.py split`: questions split into training and test sets."""

    source: str = MISSING  # in any format of data.source=
    output: str = MISSING  # folder of both sets
    held: Count = 64  # test questions of each task
    seed: Seed = 0  # of the choice and the order
    skip_bad: bool = False  # leave out questions that cannot be read


@dataclass
class ImportCommand(Ranged):
    """`scripts/convert.py import`: a published adapter or head, recognised by its tensors."""

    model: ModelConfig = MISSING
    source: str = MISSING  # folder or hub id
    exit_layer: Count | None = None  # of a Kangaroo adapter; None for the authors' releases
    output: str | None = None  # folder; None is where its drafter looks


class Layout(Enum):
    """The format that `scripts/convert.py export` writes."""

    draft_model = "draft_model"  # with the target's first layers, for vLLM, SGLang, transformers
    vllm = "vllm"  # only the adapter, for the plugin kangaroo-vllm
    speculators = "speculators"  # a head of EAGLE-3, for vLLM itself

    def __str__(self) -> str:
        return self.value  # in the name of the output folder


@dataclass
class ExportCommand:
    """`scripts/convert.py export`: an adapter for other software."""

    model: ModelConfig = MISSING
    to: Layout = Layout.draft_model  # the format
    source: str = MISSING  # folder or hub id (`adapter=` is the group of train.py)
    output: str = MISSING  # folder, which must not exist


def register() -> None:
    """Register the types of all groups, and the choices that are sections of a file."""
    store = ConfigStore.instance().store
    drafters = classes("kangaroo.drafters", DrafterConfig)
    choices: dict[str, dict[str, Any]] = {
        "logger": {"none": NoTracker, "wandb": Wandb},
        "trainer": {"default": TrainerConfig, "deepspeed": TrainerConfig(zero_stage=1)},
        "model": {"schema": ModelConfig},
        "bench": {"schema": BenchConfig},
        "adapter": {"schema": AdapterRecipe},
        "data": {
            "self_synthesis_schema": SynthesisConfig,
            "conversations_schema": ConversationsConfig,
            "mix_schema": MixConfig,
        },
        "drafter": {f"{name}_schema": kind for name, kind in drafters.items()},
        "adapter/architecture": dict(classes("kangaroo.heads", HeadConfig)),
    }
    for group, types in choices.items():
        for name, kind in types.items():
            store(group=group, name=name, node=kind)
    resolvers: dict[str, Any] = {"bench_name": bench_name, "hardware_here": hardware_here}
    resolvers |= {"fitting": fitting_name, "overrides": overrides_suffix, "output_or": output_or}
    resolvers["adapters_of"] = lambda model: adapters_of(model.path, model.name)
    resolvers["if"] = lambda x, a, b: b if x is None else a
    resolvers["draft_model_of"] = lambda model: next(
        (name for family, name in DRAFT_MODELS.items() if model.startswith(family)), None
    )
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    for command in ("convert", "prepare"):  # each action has a section
        for action, config in sections(f"{command}.yaml").items():
            store(name=f"{command}_{action}", node=config)
    for file in sorted(Path(CONFIGS, "groups").glob("*.yaml")):
        for name, config in sections(f"groups/{file.name}").items():
            if file.stem == "model":
                _add_model(name, config)
                continue
            if file.stem in ("adapter", "bench"):
                config = {"defaults": ["schema"], "name": name, **config}
            package = "_global_" if file.stem == "recipe" else None
            store(group=file.stem, name=name, node=config, package=package)


def output_or(overrides: list[str], default: str) -> str:
    """The folder that `output=` names, for the log beside the results, if Hydra can write there."""
    given = [x[7:] for x in overrides if x.startswith("output=") and "$" not in x]
    path = Path(given[-1].strip("'\"") if given else default)
    nearest = next(x for x in (path, *path.parents) if x.exists())
    can_write = path.name and nearest.is_dir() and os.access(nearest, os.W_OK)
    return str(path) if can_write else default


def sections(file: str) -> dict[str, dict[str, Any]]:
    """The sections of a file in `configs`, each a config, by name."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(Path(CONFIGS, file))))


def select_models(words: list[str]) -> list[str]:
    """A command line whose models are choices of Hydra's group `model`, so that `model=` takes what
    `kangaroo.load` takes: a folder or a hub id becomes a choice here, before Hydra reads the words.
    It is called by its last part, as are its results and adapters. `model.path=` without `model=`
    is such a path, too. Errors: `ConfigError` for two models of one name."""
    option = "model=" if any(x.startswith("model=") for x in words) else "model.path="
    paths: dict[str, str] = {}  # by name
    return [_selected(x, paths) if x.startswith(option) else x for x in words]


def _add_model(name: str, section: dict[str, Any]) -> None:
    """Add a choice of `model=`, and its recipe: its section's `train`, by default the paper's."""
    store = ConfigStore.instance().store
    train = section.pop("train", {"defaults": ["paper"]})
    store(group="recipe", name=name, node=train, package="_global_")
    store(group="model", name=name, node={"defaults": ["schema"], "name": name, **section})


def _selected(word: str, paths: dict[str, str]) -> str:
    option, _, value = word.partition("=")
    choices = []
    for model in [value] if Path(value).expanduser().exists() else value.split(","):
        try:
            config = model_config(model.strip("\"'"))
        except ConfigError:
            if option == "model":  # perhaps a choice of the user's own --config-dir
                return word
            raise
        name = config.name
        path = config.path
        if paths.setdefault(name, path) != path:
            raise ConfigError(
                f"'{paths[name]}' and '{path}' are both called '{name}', and so would their "
                "results be. Run them one by one, with model.name= for one."
            )
        if known_model(path) is None:
            _add_model(name, {"path": path})
        is_word = re.fullmatch(r"[A-Za-z_][\w.+-]*", name, re.ASCII)
        choices.append(name if is_word else f'"{name}"')
    return f"model={','.join(choices)}"


register()
