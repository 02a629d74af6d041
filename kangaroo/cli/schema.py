"""What can be written on the command line: each command's groups and fields, by their dataclasses.

Every component brings a dataclass; here they become Hydra's types, so a mistyped key or a wrong
type is refused before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from kangaroo.api import hardware_here
from kangaroo.chat import ChatConfig
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.mix import MixConfig
from kangaroo.data.synthesis import SynthesisConfig
from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.calibration import CalibrateConfig
from kangaroo.drafters.layer_search import SearchConfig
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.bench import BenchConfig, bench_name
from kangaroo.evaluation.config import EvaluateConfig
from kangaroo.evaluation.speed.speed import SpeedConfig
from kangaroo.evaluation.study.study import StudyConfig
from kangaroo.evaluation.tune.search import TuneConfig
from kangaroo.heads.base import HeadConfig
from kangaroo.hub.transfer import PullConfig, PushConfig
from kangaroo.models.loading import ModelConfig
from kangaroo.serving.config import ServeConfig
from kangaroo.soak.run import SoakConfig
from kangaroo.training.compare import CompareConfig
from kangaroo.training.config import TrainerConfig
from kangaroo.training.recipe import AdapterRecipe
from kangaroo.under_load.config import LoadConfig
from kangaroo.utils.discovery import classes
from kangaroo.utils.folders import fitting, named_by
from kangaroo.utils.ranges import Count, Ranged
from kangaroo.utils.tracking import NoTrackerConfig, WandbConfig

# Of trees and drafts, by drafter and option, and of the paper's experiments: a file of
# configs/hardware.
Sizes = dict[str, dict[str, Any]]
# Of which families there is a draft model (configs/drafter).
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
class EvaluateCommand(EvaluateConfig):
    """`python evaluate.py`: a target, a drafter, and what they are asked; or finished results that
    a page is made of; or adapters, measured on text that they were not trained on.
    """

    output: str = MISSING
    model: ModelConfig = MISSING
    drafter: Any = MISSING
    variants: dict[str, list[Any]] = field(default_factory=dict)  # values of the drafter's options
    more: dict[str, Any] = field(default_factory=dict)  # drafters that answer the same questions
    hardware: Sizes = field(default_factory=dict)
    logger: Any = MISSING
    study: StudyConfig | None = None  # what the results are a table and a plot of
    race: bool = False  # before that, the first question by each method, side by side as they write
    results: str | None = None  # a folder of finished results, which nothing is added to
    page: str | None = None  # the Markdown file that tells them
    compare: CompareConfig = field(default_factory=CompareConfig)
    data: Any = None  # whose end the adapters of `compare` are measured on


@dataclass
class SpeedCommand:
    """`python scripts/speed.py`: how fast, against what the memory allows."""

    model: ModelConfig = MISSING
    drafter: Any = MISSING
    more: dict[str, Any] = field(default_factory=dict)  # drafters that answer the same questions
    hardware: Sizes = field(default_factory=dict)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    output: str = MISSING


@dataclass
class SoakCommand:
    """`python scripts/soak.py`: many tokens by every drafter, all compared with vanilla's."""

    model: ModelConfig = MISSING
    drafters: dict[str, Any] = field(default_factory=dict)  # of the model
    hardware: Sizes = field(default_factory=dict)
    bench: BenchConfig = field(default_factory=BenchConfig)  # what the model is asked
    soak: SoakConfig = field(default_factory=SoakConfig)
    output: str = MISSING


@dataclass
class TuneCommand(TuneConfig):
    """`python scripts/tune.py`: the fastest drafter and its settings."""

    output: str = MISSING
    model: ModelConfig = MISSING
    drafter: Any = MISSING  # today's
    hardware: Sizes = field(default_factory=dict)


@dataclass
class SearchCommand:
    """`python scripts/search_layers.py`: which layers a draft may skip."""

    model: ModelConfig = MISSING
    data: Any = MISSING
    search: SearchConfig = field(default_factory=SearchConfig)
    output: str = MISSING


@dataclass
class CalibrateCommand:
    """`python scripts/calibrate.py`: how often what a hybrid drafts from is right."""

    model: ModelConfig = MISSING
    data: Any = MISSING
    drafter: Any = MISSING
    hardware: Sizes = field(default_factory=dict)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)


@dataclass
class DatastoreCommand:
    """`python scripts/datastore.py`: documents that drafters may search."""

    model: ModelConfig = MISSING
    data: Any = None  # a dataset; '~data' on the command line leaves it out
    texts: list[str] = field(default_factory=list)  # files, each a document
    output: str = MISSING


@dataclass
class ImportAdapterCommand(Ranged):
    """`python scripts/import_adapter.py`: a checkpoint of the authors' code becomes an adapter.

    Args:
        source: its folder, or hub id.
        exit_layer: how many of the target's layers lie below it; it does not say itself. None is
            known for the released ones.
        output: the adapter's folder.
    """

    model: ModelConfig = MISSING
    source: str = MISSING
    exit_layer: Count | None = None
    output: str = MISSING


class Layout(Enum):
    """What `scripts/export.py` makes of an adapter.

    `draft_model`: a checkpoint with the target's first layers, for vLLM, SGLang, transformers.
    `vllm`: the adapter alone, for the plugin kangaroo-vllm.
    `official`: a checkpoint for the authors' code.
    """

    draft_model = "draft_model"
    vllm = "vllm"
    official = "official"

    def __str__(self) -> str:
        return self.value  # in the name of the output folder


@dataclass
class ExportCommand:
    """`python scripts/export.py`: an adapter for other software.

    Args:
        to: what it becomes.
        source: the adapter's folder, or hub id. (`adapter=` is the group of train.py.)
        output: the folder of what it becomes, which must not be there yet.
    """

    model: ModelConfig = MISSING
    to: Layout = Layout.draft_model
    source: str = MISSING
    output: str = MISSING


@dataclass
class PushCommand(PushConfig):
    """`python scripts/push.py`: an adapter with its model card to the hub."""

    source: str = MISSING
    repo: str = MISSING
    output: str = MISSING


@dataclass
class PullCommand(PullConfig):
    """`python scripts/pull.py`: an adapter from the hub."""

    repo: str = MISSING
    output: str = MISSING


@dataclass
class ServeCommand(ServeConfig):
    """`python scripts/serve.py`: a target and a drafter, for many at a time."""

    model: ModelConfig = MISSING
    drafter: Any = MISSING
    hardware: Sizes = field(default_factory=dict)


@dataclass
class LoadCommand(LoadConfig):
    """`python scripts/load.py`: servers by how many ask at the same time."""

    output: str = MISSING
    model: ModelConfig = MISSING
    drafters: dict[str, Any] = field(default_factory=dict)  # a server each
    hardware: Sizes = field(default_factory=dict)


@dataclass
class TalkCommand:
    """`python scripts/chat.py`: a target, a drafter, how tokens are chosen."""

    model: ModelConfig = MISSING
    drafter: Any = MISSING
    hardware: Sizes = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    chat: ChatConfig = field(default_factory=ChatConfig)


def register() -> None:
    """Tell Hydra the types of all groups; the YAML files in `configs/` hold only differences."""
    cs = ConfigStore.instance()
    cs.store(name="train_schema", node=TrainCommand)
    cs.store(name="evaluate_schema", node=EvaluateCommand)
    cs.store(name="speed_schema", node=SpeedCommand)
    cs.store(name="soak_schema", node=SoakCommand)
    cs.store(name="chat_schema", node=TalkCommand)
    cs.store(name="serve_schema", node=ServeCommand)
    cs.store(name="load_schema", node=LoadCommand)
    cs.store(name="tune_schema", node=TuneCommand)
    cs.store(name="calibrate_schema", node=CalibrateCommand)
    cs.store(name="search_layers_schema", node=SearchCommand)
    cs.store(name="datastore_schema", node=DatastoreCommand)
    cs.store(name="import_adapter_schema", node=ImportAdapterCommand)
    cs.store(name="export_schema", node=ExportCommand)
    cs.store(name="push_schema", node=PushCommand)
    cs.store(name="pull_schema", node=PullCommand)
    cs.store(group="model", name="schema", node=ModelConfig)
    cs.store(group="bench", name="schema", node=BenchConfig)
    cs.store(group="adapter", name="schema", node=AdapterRecipe)
    cs.store(group="trainer", name="schema", node=TrainerConfig)
    cs.store(group="data", name="self_synthesis_schema", node=SynthesisConfig)
    cs.store(group="data", name="conversations_schema", node=ConversationsConfig)
    cs.store(group="data", name="mix_schema", node=MixConfig)
    for name, drafter in classes("kangaroo.drafters", DrafterConfig).items():
        cs.store(group="drafter", name=f"{name}_schema", node=drafter)
    for name, architecture in classes("kangaroo.heads", HeadConfig).items():
        cs.store(group="adapter/architecture", name=name, node=architecture)
    cs.store(group="logger", name="none_schema", node=NoTrackerConfig)
    cs.store(group="logger", name="wandb_schema", node=WandbConfig)
    OmegaConf.register_new_resolver("bench_name", bench_name, replace=True)
    OmegaConf.register_new_resolver("overrides", named_by, replace=True)
    OmegaConf.register_new_resolver("if", lambda x, a, b: b if x is None else a, replace=True)
    OmegaConf.register_new_resolver("fitting", fitting, replace=True)
    OmegaConf.register_new_resolver("hardware_here", hardware_here, replace=True)
    OmegaConf.register_new_resolver("draft_model_of", draft_model_of, replace=True)


def draft_model_of(model: str, option: str) -> str | None:
    """A model's draft model as an option of drafter=draft_model: `model`, or where there is no
    smaller one with its tokens `adapter`, which makes one of its own first layers.
    """
    small = next((own for family, own in DRAFT_MODELS.items() if model.startswith(family)), None)
    adapter = None if small else f"adapters/{model}"
    return {"model": small, "adapter": adapter}[option]
