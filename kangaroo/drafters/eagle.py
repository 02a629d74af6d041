"""EAGLE: one layer goes on from the target's final states, as a chain or as EAGLE-2's tree.

Shapes: B rows, L nodes of a level, M candidates of a level.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kangaroo.drafters.base import Drafter, EarlyExitConfig
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree, Level
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.eagle_head import EagleHead, EagleHeadConfig
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, DraftSize, check_nodes


@dataclass
class EagleConfig(EarlyExitConfig):
    """EAGLE-1's head (arXiv 2401.15077) with a chain, or with EAGLE-2's tree (arXiv 2406.16858).

    Args:
        adapter: folder or hub id of a trained head (`python train.py adapter=eagle`).
        top_k: candidates of a node, and nodes of a level that get candidates; 1 is a chain.
        nodes: of the tree that is verified, the pending token aside (the paper's m).
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
        return EagleTree(lm, trained, *limits, min_confidence=0.0)


class EagleTree(KangarooTree):
    """EAGLE-2's dynamic tree. It grows as Kangaroo's does: the most confident nodes of a level get
    candidates. Then all candidates of all levels are ranked again, those without a level's place,
    too, and the most confident are verified, from their embeddings on."""

    def offered(self, levels: list[Level]) -> Sequence[Sequence[Tensor]]:
        parents, first = [levels[0].parents_BL], 0
        for above in levels[:-1]:
            parents.append((first + above.places_BL).repeat_interleave(self.top_k, 1))
            first += above.children_BM.shape[1]
        chances = [level.chances_BM for level in levels]
        return parents, chances, [level.children_BM for level in levels]
