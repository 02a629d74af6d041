"""EAGLE: a layer continues from the target's final states, and drafts a chain or EAGLE-2's tree.

Shapes: B rows, L nodes of a level, M candidates of a level.
"""

from dataclasses import dataclass
from typing import ClassVar

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree, KangarooTreeConfig, Level
from kangaroo.heads.base import HeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.eagle_head import EagleHead, EagleHeadConfig
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, Threshold


@dataclass
class EagleConfig(KangarooTreeConfig):
    """EAGLE-1's head (arXiv 2401.15077) with a chain, or with EAGLE-2's tree (arXiv 2406.16858).

    Args:
        adapter: folder or hub id of a trained head (`python train.py adapter=eagle`).
        top_k: candidates of a node, and nodes of a level that get candidates; 1 is a chain.
        nodes: the most nodes of the verified tree, without the pending token (the paper's m).
        min_confidence: as in Kangaroo's tree; 0, as in the paper, verifies the best `nodes`.
    """

    name: str = "eagle"
    top_k: Count = 1
    min_confidence: Threshold | None = 0.0

    layer_type: ClassVar[type[Layer]] = EagleHead
    layer_config: ClassVar[type[HeadConfig]] = EagleHeadConfig

    def build(self, lm: TargetModel) -> Drafter:
        layer, head = self.load(lm)
        kind = Kangaroo if self.top_k == 1 else EagleTree
        return kind(lm, layer, self, head)


class EagleTree(KangarooTree):
    """EAGLE-2's dynamic tree. As in Kangaroo's, the most confident nodes of a level get candidates.
    Then candidates of all levels are ranked, and the best are verified from their embeddings on."""

    hands_on_states = False

    def __init__(
        self, lm: TargetModel, adapter: Layer, options: KangarooTreeConfig, head: DraftHead | None
    ):
        super().__init__(lm, adapter, options, head)
        self.max_nodes = max(self.max_nodes, self.nodes)  # there are more candidates than nodes

    def candidates(self, levels: list[Level]) -> list[Level]:
        parents = [levels[0].parents_BL]
        first = 0
        for level in levels[:-1]:
            parents.append((first + level.places_BL).repeat_interleave(self.top_k, 1))
            first += level.children_BM.shape[1]
        return [
            level._replace(parents_BL=x, score_BL=level.chances_BM, tokens_BL=level.children_BM)
            for level, x in zip(levels, parents, strict=True)
        ]
