"""EAGLE: one layer goes on from the target's final states, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kangaroo.drafters.base import Drafter, EarlyExitConfig
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.eagle_head import EagleHead, EagleHeadConfig
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, DraftSize, check_nodes


@dataclass
class EagleConfig(EarlyExitConfig):
    """EAGLE-1 (arXiv 2401.15077): a chain, or the tree of its likeliest continuations.

    The paper's tree has a fixed shape; this one grows by confidence, as Kangaroo's and, in spirit,
    EAGLE-2's (arXiv 2406.16858).

    Args:
        adapter: folder or hub id of a trained head (`python train.py adapter=eagle`).
        top_k: candidates of a node and nodes of a level; 1 is a chain.
        nodes: of the tree that is verified, the pending token aside.
    """

    name: str = "eagle"
    top_k: Count = 1
    nodes: DraftSize = 32

    kind: ClassVar[type[EagleHead]] = EagleHead
    parts: ClassVar[type[EagleHeadConfig]] = EagleHeadConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nodes(self.top_k * self.steps, top_k=self.top_k, steps=self.steps)

    def of(self, lm: TargetModel, trained: Any, heads: list[DraftHead]) -> Drafter:
        """Errors: `ConfigError`."""
        if self.top_k == 1:
            return Kangaroo(lm, trained, self.steps, self.threshold, heads[0])
        limits = self.steps, self.threshold, heads[0], self.top_k, self.nodes
        return KangarooTree(lm, trained, *limits)
