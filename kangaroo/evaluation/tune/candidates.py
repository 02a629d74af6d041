"""What tuning chooses from: adapters with draft vocabularies, and the settings of drafters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import safe_open

from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.cascade import CascadeConfig
from kangaroo.drafters.early_exit import EarlyExitConfig
from kangaroo.drafters.hybrid import HybridConfig
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.kangaroo_tree import KangarooTreeConfig
from kangaroo.drafters.layer_chain import LayerChain
from kangaroo.drafters.layer_tree import LayerTree
from kangaroo.drafters.prompt_lookup import PromptLookupConfig
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import SHIPPED, of_project
from kangaroo.utils.ranges import Count, DraftSize, Filled, Positive, Ranged, Threshold

KINDS = ("kangaroo", "hybrid", "cascade", "prompt_lookup", "kangaroo_tree")


@dataclass
class SearchSpace(Ranged):
    """The settings that are tried, each with each.

    Args:
        drafters: of kangaroo, hybrid, cascade (of prompt_lookup and kangaroo), prompt_lookup and
            kangaroo_tree, which is not among them by default: its trace takes `top_k` times as
            long.
        adapters: folders or hub ids; null is `adapters/NAME` of the model, and what else lies
            beside it as `adapters/NAME-*`.
        vocabularies: draft vocabularies, beside the one that an adapter was saved with, where it
            has as many tokens to draft from.
        thresholds, steps: of kangaroo and of kangaroo_tree.
        top_k, tree_nodes, least: of kangaroo_tree; `top_k` is one number.
        paces, nodes: of the hybrid, whose chain has the most of `steps` and no threshold.
        lookups: draft tokens of prompt lookup, alone and in a cascade.
    """

    drafters: Filled[str] = field(default_factory=lambda: list(KINDS[:4]))
    adapters: list[str] | None = None
    vocabularies: list[Count] = field(default_factory=lambda: [1024, 4096])
    thresholds: Filled[Threshold] = field(
        default_factory=lambda: [0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    )
    steps: Filled[DraftSize] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 8])
    paces: Filled[Positive] = field(default_factory=lambda: [1.0, 1.25, 1.5, 2.0])
    nodes: Filled[DraftSize] = field(default_factory=lambda: [7, 9, 15])
    lookups: Filled[DraftSize] = field(default_factory=lambda: [3, 5, 8])
    top_k: Count = 3
    tree_nodes: Filled[DraftSize] = field(default_factory=lambda: [4, 8, 16, 32])
    least: Filled[Threshold | None] = field(default_factory=lambda: [None, 0.05, 0.1])

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be tried."""
        for name in self.drafters:
            if name not in KINDS:
                raise ConfigError(
                    f"search.drafters has '{name}'; what a trace can replay is {', '.join(KINDS)}."
                )


@dataclass(frozen=True)
class Source:
    """An adapter with a draft vocabulary.

    Args:
        config: of Kangaroo with it, with the longest chain that is searched.
        drafter: built from this.
        tree: the same for trees, where these are searched.
    """

    name: str
    config: KangarooConfig
    drafter: LayerChain
    tree: LayerTree | None = None

    @property
    def traced(self) -> dict[str, LayerChain | LayerTree]:
        """What is traced, by its name in the trace."""
        own: dict[str, LayerChain | LayerTree] = {self.name: self.drafter}
        return own if self.tree is None else own | {self.tree_name: self.tree}

    @property
    def tree_name(self) -> str:
        """Of its trees, in a trace."""
        return f"{self.name}-tree"


@dataclass(frozen=True)
class Candidate:
    """Settings of a drafter.

    Args:
        source: the name of what it drafts with; None reads the text alone.
    """

    config: DrafterConfig
    source: str | None = None

    @property
    def kind(self) -> str:
        """Which drafter it is."""
        return self.config.name

    @property
    def name(self) -> str:
        """What results call it."""
        told = [self.kind, *([self.source] if self.source else []), *_settings(self.config)]
        return ",".join(told)


def parts(config: DrafterConfig) -> list[DrafterConfig]:
    """Of a cascade both drafters; of another drafter itself."""
    return [config.first, config.second] if isinstance(config, CascadeConfig) else [config]


def _settings(config: DrafterConfig) -> list[str]:
    if isinstance(config, CascadeConfig):
        return [told for part in parts(config) for told in _settings(part)]
    if isinstance(config, PromptLookupConfig):
        return [f"num_pred_tokens={config.num_pred_tokens}"]
    if isinstance(config, HybridConfig):
        return [f"pace={config.pace:g}", f"nodes={config.nodes}", f"steps={config.steps}"]
    if not isinstance(config, EarlyExitConfig):
        return []
    told = [f"threshold={config.threshold:g}", f"steps={config.steps}"]
    if isinstance(config, KangarooTreeConfig):
        told.append(f"nodes={config.nodes}")
        told += [] if config.least is None else [f"least={config.least:g}"]
    return told


def sources(lm: LM, model_name: str, space: SearchSpace) -> dict[str, Source]:
    """Every adapter with every draft vocabulary, by name; the adapter's own first.

    Errors: those of `KangarooConfig.build`; `ConfigError` where two adapters have one name.
    """
    found: dict[str, Source] = {}
    paths = space.adapters if space.adapters is not None else shipped(model_name)
    for path in paths:
        for vocabulary in [None, *_vocabularies(path, space.vocabularies)]:
            config = KangarooConfig(adapter=path, steps=max(space.steps), vocabulary=vocabulary)
            trained = config.load(lm)
            drafter = config.of(lm, *trained)
            name = f"{Path(path).name.replace(':', '')}-{drafter.head.size}"
            if name not in found:
                trees = "kangaroo_tree" in space.drafters
                tree = tree_config(config, space, 0.0, 1, None).of(lm, *trained) if trees else None
                found[name] = Source(name, config, drafter, tree)
            elif found[name].config.adapter != path:
                raise ConfigError(
                    f"search.adapters has '{found[name].config.adapter}' and '{path}', which "
                    "results cannot tell apart; rename one of the folders, or give one of them."
                )
    return found


def shipped(model_name: str) -> list[str]:
    """The adapters of a model that Kangaroo can draft with.

    Errors: `AdapterNotFound` where there is none.
    """
    first = SHIPPED / model_name
    adapter_files.find(str(first))  # its error says what to do
    beside = {
        folder.name
        for place in (SHIPPED, of_project("adapters"))
        for folder in place.glob(f"{model_name}-*")
        if (folder / adapter_files.CONFIG).is_file()
    }
    names = [model_name, *sorted(beside)]
    known = {name: adapter_files.read_config(str(SHIPPED / name)) for name in names}
    own = [name for name in names if isinstance(known[name].architecture, AdapterHeadConfig)]
    return [str(SHIPPED / name) for name in own]


def _vocabularies(path: str, wanted: Sequence[int]) -> list[int]:
    """Those of the wanted sizes that an adapter can draft from."""
    if path.startswith("untrained:"):
        return []
    folder, config = adapter_files.find(path), adapter_files.read_config(path)
    has_own_head = bool(getattr(config.architecture, "own_head", False))
    if has_own_head or not (folder / adapter_files.VOCABULARY).is_file():
        return []
    with safe_open(folder / adapter_files.VOCABULARY, "np") as opened:
        (known,) = opened.get_slice("frequent").get_shape()
    return [size for size in wanted if size <= known]


def candidates(space: SearchSpace, found: Sequence[Source]) -> list[Candidate]:
    """All settings of the space."""
    made: list[Candidate] = []
    lookups = [PromptLookupConfig(num_pred_tokens=count) for count in space.lookups]
    if "prompt_lookup" in space.drafters:
        made += [Candidate(lookup) for lookup in lookups]
    for source in found:
        chains = [
            replace(source.config, threshold=threshold, steps=steps)
            for threshold, steps in itertools.product(space.thresholds, space.steps)
            if steps > 1 or threshold == space.thresholds[0]  # one token is drafted in any case
        ]
        if "kangaroo" in space.drafters:
            made += [Candidate(config, source.name) for config in chains]
        if "kangaroo_tree" in space.drafters:
            made += [
                Candidate(tree_config(config, space, config.threshold, nodes, least), source.name)
                for config, nodes, least in itertools.product(chains, space.tree_nodes, space.least)
                if config.steps > 1
            ]
        if "cascade" in space.drafters:
            made += [
                Candidate(CascadeConfig(first=lookup, second=config), source.name)
                for lookup, config in itertools.product(lookups, chains)
            ]
        if "hybrid" in space.drafters:
            made += [
                Candidate(hybrid(source, pace, nodes), source.name)
                for pace, nodes in itertools.product(space.paces, space.nodes)
            ]
    return made


def chain(source: Source, threshold: float, steps: int) -> Candidate:
    """Kangaroo with a source."""
    return Candidate(replace(source.config, threshold=threshold, steps=steps), source.name)


def tree_config(
    chain: KangarooConfig, space: SearchSpace, threshold: float, nodes: int, least: float | None
) -> KangarooTreeConfig:
    """Trees as deep as a chain."""
    return KangarooTreeConfig(
        adapter=chain.adapter,
        vocabulary=chain.vocabulary,
        steps=chain.steps,
        threshold=threshold,
        top_k=space.top_k,
        nodes=nodes,
        least=least,
    )


def hybrid(source: Source, pace: float, nodes: int) -> HybridConfig:
    """The hybrid with a source, and the longest chain of the search."""
    about = source.config
    return HybridConfig(
        adapter=about.adapter,
        vocabulary=about.vocabulary,
        steps=about.steps,
        pace=pace,
        nodes=nodes,
    )
