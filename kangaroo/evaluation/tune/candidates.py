"""What tuning chooses from: adapters with draft vocabularies, and the settings of drafters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.cascade import CascadeConfig
from kangaroo.drafters.hybrid import HybridConfig
from kangaroo.drafters.kangaroo import Kangaroo, KangarooConfig
from kangaroo.drafters.kangaroo_tree import KangarooTree, KangarooTreeConfig
from kangaroo.drafters.prompt_lookup import PromptLookupConfig
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterNotFound, ConfigError
from kangaroo.utils.folders import SHIPPED, of_project
from kangaroo.utils.ranges import Count, DraftSize, Filled, Positive, Ranged, Threshold

# What a trace can replay, and the settings that tell two candidates apart.
SETTINGS = {
    "kangaroo": ["threshold", "steps"],
    "hybrid": ["min_gain_per_step", "nodes", "steps"],
    "cascade": [],  # those of its parts
    "prompt_lookup": ["num_pred_tokens"],
    "kangaroo_tree": ["threshold", "steps", "nodes", "min_confidence"],
}
KINDS = list(SETTINGS)
TAKEN = "adapter", "vocabulary"  # options that a source fixes
TREES = "-tree"  # ends the name of a source's trees in a trace


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
        top_k, tree_nodes, min_confidence: of kangaroo_tree; `top_k` is one number.
        min_gains, nodes: of the hybrid, whose chain has the most of `steps` and no threshold.
        lookups: draft tokens of prompt lookup, alone and in a cascade.
    """

    drafters: Filled[str] = field(default_factory=lambda: KINDS[:4])
    adapters: list[str] | None = None
    vocabularies: list[Count] = field(default_factory=lambda: [1024, 4096])
    thresholds: Filled[Threshold] = field(
        default_factory=lambda: [0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    )
    steps: Filled[DraftSize] = field(default_factory=lambda: [1, 2, 3, 4, 5, 6, 8])
    min_gains: Filled[Positive] = field(default_factory=lambda: [1.0, 1.25, 1.5, 2.0])
    nodes: Filled[DraftSize] = field(default_factory=lambda: [7, 9, 15])
    lookups: Filled[DraftSize] = field(default_factory=lambda: [3, 5, 8])
    top_k: Count = 3
    tree_nodes: Filled[DraftSize] = field(default_factory=lambda: [4, 8, 16, 32])
    min_confidence: Filled[Threshold | None] = field(default_factory=lambda: [None, 0.05, 0.1])

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be tried."""
        if others := set(self.drafters) - set(KINDS):
            raise ConfigError(
                f"search.drafters has '{min(others)}'; what a trace can replay is "
                f"{', '.join(KINDS)}."
            )


@dataclass(frozen=True)
class Source:
    """An adapter with a draft vocabulary.

    Args:
        config: of Kangaroo with it, with the longest chain that is searched.
        trained: the adapter and its heads.
        drafter: built of these.
        traced: this, and trees as deep where they are searched, by their names in a trace.
    """

    name: str
    config: KangarooConfig
    trained: tuple[Layer, list[DraftHead]]
    drafter: Kangaroo
    traced: dict[str, Kangaroo | KangarooTree]


@dataclass(frozen=True)
class Candidate:
    """Settings of a drafter.

    Args:
        source: the name of what it drafts with; None reads the text alone.
    """

    config: DrafterConfig
    source: str | None = None

    @property
    def name(self) -> str:
        """What results call it."""
        config, words = self.config, [self.config.name, *filter(None, [self.source])]
        parts = [config.first, config.second] if isinstance(config, CascadeConfig) else [config]
        for part in parts:
            values = {option: getattr(part, option) for option in SETTINGS.get(part.name, [])}
            words += [f"{k}={value:g}" for k, value in values.items() if value is not None]
        return ",".join(words)


def sources(lm: TargetModel, model_name: str, space: SearchSpace) -> dict[str, Source]:
    """Every adapter with every draft vocabulary that it has, by name; the adapter's own first.

    Errors: those of `KangarooConfig.build`; `ConfigError` where two adapters have one name.
    """
    by_name: dict[str, Source] = {}
    paths = space.adapters if space.adapters is not None else shipped(model_name)
    for path, vocabulary in itertools.product(paths, [None, *space.vocabularies]):
        about: dict[str, Any] = {"adapter": path, "vocabulary": vocabulary}
        config = KangarooConfig(**about, steps=max(space.steps))
        try:
            trained = config.load(lm)
        except (AdapterNotFound, ConfigError):
            if vocabulary is None:
                raise
            continue  # it has fewer tokens to draft from, or a head of its own
        drafter = config.of(lm, *trained)
        name = f"{Path(path).name.replace(':', '')}-{drafter.head.size}"
        if name not in by_name:
            traced: dict[str, Kangaroo | KangarooTree] = {name: drafter}
            if "kangaroo_tree" in space.drafters:
                trees = KangarooTreeConfig(**about, steps=max(space.steps), top_k=space.top_k)
                traced[name + TREES] = trees.of(lm, *trained)
            by_name[name] = Source(name, config, trained, drafter, traced)
        elif by_name[name].config.adapter != path:
            raise ConfigError(
                f"search.adapters has '{by_name[name].config.adapter}' and '{path}', which "
                "results cannot tell apart; rename one of the folders, or give one of them."
            )
    return by_name


def shipped(model_name: str) -> list[str]:
    """The adapters of a model that Kangaroo can draft with.

    Errors: `AdapterNotFound` where there is none.
    """
    adapter_files.find(str(SHIPPED / model_name))  # its error says what to do
    beside = {
        folder.name
        for place in (SHIPPED, of_project("adapters"))
        for folder in place.glob(f"{model_name}-*")
        if (folder / adapter_files.CONFIG).is_file()
    }
    paths = [str(SHIPPED / name) for name in [model_name, *sorted(beside)]]
    return [
        x for x in paths if isinstance(adapter_files.read_config(x).architecture, AdapterHeadConfig)
    ]


def candidates(space: SearchSpace, by_name: Mapping[str, Source]) -> list[Candidate]:
    """All settings of the space."""
    lookups = [PromptLookupConfig(num_pred_tokens=count) for count in space.lookups]
    limits: list[dict[str, Any]] = [
        {"threshold": threshold, "steps": steps}
        for threshold, steps in itertools.product(space.thresholds, space.steps)
        if steps > 1 or threshold == space.thresholds[0]  # one token is drafted in any case
    ]
    every = [Candidate(lookup) for lookup in lookups]
    for name, source in by_name.items():
        about: dict[str, Any] = {key: getattr(source.config, key) for key in TAKEN}
        chains = [KangarooConfig(**about, **limit) for limit in limits]
        trees = [
            KangarooTreeConfig(
                **about, **limit, top_k=space.top_k, nodes=nodes, min_confidence=min_confidence
            )
            for limit, nodes, min_confidence in itertools.product(
                limits, space.tree_nodes, space.min_confidence
            )
            if limit["steps"] > 1
        ]
        cascades = [
            CascadeConfig(first=lookup, second=chain)
            for lookup, chain in itertools.product(lookups, chains)
        ]
        hybrids = [
            HybridConfig(
                **about, steps=source.config.steps, min_gain_per_step=min_gain_per_step, nodes=nodes
            )
            for min_gain_per_step, nodes in itertools.product(space.min_gains, space.nodes)
        ]
        every += [Candidate(config, name) for config in (*chains, *trees, *cascades, *hybrids)]
    return [candidate for candidate in every if candidate.config.name in space.drafters]
