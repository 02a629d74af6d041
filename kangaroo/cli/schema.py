"""What can be written on the command line: each command's groups and fields, by their dataclasses.
They become Hydra's types, so a mistyped key or a wrong type is refused before anything is loaded.
"""

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
from kangaroo.heads.base import HeadConfig
from kangaroo.models.loading import ModelConfig
from kangaroo.serving.serve import ServeConfig
from kangaroo.training.recipe import AdapterRecipe, TrainerConfig
from kangaroo.utils.discovery import classes
from kangaroo.utils.folders import fitting, named_by, of_project
from kangaroo.utils.ranges import Count, Ranged, Seed
from kangaroo.utils.tracking import NoTracker, Wandb

CONFIGS = str(of_project("configs"))
# Of trees and drafts, by drafter and option, and of the paper's experiments: a choice of hardware=.
Sizes = dict[str, dict[str, Any]]
# The smaller model with its tokens that drafts for a model, by family (drafter=draft_model).
DRAFT_MODELS = {"vicuna": "double7/vicuna-68m", "llama-2": "JackFram/llama-68m"}


@dataclass
class TrainCommand:
    """`python train.py`: a target, its data, how to train, where to log."""

    model: ModelConfig = MISSING
    data: Any = MISSING
    adapter: AdapterRecipe = MISSING
    more: dict[str, AdapterRecipe] = field(default_factory=dict)  # from the same frozen pass
    trainer: TrainerConfig = MISSING
    logger: Any = MISSING
    output: str = MISSING
    estimate: bool = False  # only say what it takes, and whether it fits


@dataclass
class DraftingCommand:
    """What decodes with a drafter."""

    model: ModelConfig = MISSING
    drafter: Any = MISSING
    hardware: Sizes = field(default_factory=dict)


@dataclass
class EvaluateCommand(DraftingCommand, EvaluateConfig):
    """`evaluate.py`: a target, a drafter, what they are asked; or a page of finished results."""

    variants: dict[str, list[Any]] = field(default_factory=dict)  # values of the drafter's options
    more: dict[str, Any] = field(default_factory=dict)  # drafters that answer the same questions
    logger: Any = MISSING
    study: StudyConfig | None = None  # what the results are a table and a plot of
    race: bool = False  # before that, the first question by each method, side by side as they write
    results: str | None = None  # a folder of finished results, which nothing is added to
    page: str | None = None  # the Markdown file that tells them


@dataclass
class SpeedCommand(DraftingCommand):
    """`scripts/speed.py`: how fast, against what the memory allows."""

    more: dict[str, Any] = field(default_factory=dict)  # drafters that answer the same questions
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    output: str = MISSING


@dataclass
class ChatCommand(DraftingCommand):
    """`scripts/chat.py`: a target, a drafter, how tokens are chosen."""

    sampling: Sampling = field(default_factory=Sampling)
    chat: ChatConfig = field(default_factory=ChatConfig)


@dataclass
class ServeCommand(DraftingCommand, ServeConfig):
    """`scripts/serve.py`: a target and a drafter, for many at a time."""


@dataclass
class TuneCommand(DraftingCommand, TuneConfig):
    """`scripts/tune.py`: the fastest drafter and its settings; `drafter` is today's."""

    more: dict[str, Any] = field(default_factory=dict)  # drafters that are tried beside today's
    search: dict[str, dict[str, list[Any]]] = field(default_factory=dict)  # options, by drafter


@dataclass
class DatastoreCommand:
    """`scripts/prepare.py datastore`: documents that drafters may search."""

    model: ModelConfig = MISSING
    data: Any = None  # a dataset; '~data' on the command line leaves it out
    texts: list[str] = field(default_factory=list)  # files, each a document
    output: str = MISSING


@dataclass
class LayersCommand:
    """`scripts/prepare.py layers`: which layers a draft may skip."""

    model: ModelConfig = MISSING
    data: Any = MISSING
    search: SearchConfig = field(default_factory=SearchConfig)
    output: str = MISSING


@dataclass
class SplitCommand(Ranged):
    """`scripts/prepare.py split`: questions to learn from, and others to measure on."""

    source: str = MISSING  # in any form that data.source= takes
    output: str = MISSING
    held: Count = 64  # questions to hold out of each task
    seed: Seed = 0  # of the choice and of the order
    skip_bad: bool = False  # leave out what cannot be read


@dataclass
class ImportCommand(Ranged):
    """`scripts/convert.py import`: a checkpoint of the authors' code becomes an adapter."""

    model: ModelConfig = MISSING
    source: str = MISSING  # its folder, or hub id
    exit_layer: Count | None = None  # how many layers lie below it; that of released ones is known
    output: str = MISSING


class Layout(Enum):
    """What `scripts/convert.py export` makes of an adapter."""

    draft_model = "draft_model"  # the target's first layers too, for vLLM, SGLang, transformers
    vllm = "vllm"  # the adapter alone, for the plugin kangaroo-vllm

    def __str__(self) -> str:
        return self.value  # in the name of the output folder


@dataclass
class ExportCommand:
    """`scripts/convert.py export`: an adapter for other software."""

    model: ModelConfig = MISSING
    to: Layout = Layout.draft_model
    source: str = MISSING  # folder or hub id (`adapter=` is the group of train.py)
    output: str = MISSING


# Choices that have no file: those of a group by name, each a type with its defaults.
CHOICES: dict[str, dict[str, Any]] = {
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
}


def register() -> None:
    """Tell Hydra the types of all groups, and the choices that are sections of a file."""
    store = ConfigStore.instance().store
    drafters = classes("kangaroo.drafters", DrafterConfig)
    choices = CHOICES | {
        "drafter": {f"{name}_schema": kind for name, kind in drafters.items()},
        "adapter/architecture": dict(classes("kangaroo.heads", HeadConfig)),
    }
    for group, types in choices.items():
        for name, kind in types.items():
            store(group=group, name=name, node=kind)
    functions: tuple[Any, ...] = bench_name, fitting, hardware_here
    resolvers = {function.__name__: function for function in functions}
    resolvers |= {"overrides": named_by, "if": lambda x, a, b: b if x is None else a}
    resolvers["draft_model_of"] = lambda model: next(
        (name for family, name in DRAFT_MODELS.items() if model.startswith(family)), None
    )
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    for command in ("convert", "prepare"):  # whose second word says which section is theirs
        for action, config in sections(f"{command}.yaml").items():
            store(name=f"{command}_{action}", node=config)
    for file in sorted(Path(CONFIGS, "groups").glob("*.yaml")):
        for name, config in sections(f"groups/{file.name}").items():
            if file.stem == "model":
                store(group="recipe", name=name, node=config.pop("train"), package="_global_")
                config = {"defaults": ["schema"], "name": name, **config}
            package = "_global_" if file.stem == "recipe" else None
            store(group=file.stem, name=name, node=config, package=package)


def sections(file: str) -> dict[str, dict[str, Any]]:
    """The configs of a file in `configs`, one a section, by name."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(Path(CONFIGS, file))))


register()
