"""Kangaroo with a tree: an adapter drafts the likeliest continuations until all grow unlikely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kangaroo.drafters.early_exit import EarlyExitConfig
from kangaroo.drafters.layer_tree import LayerTree
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import LM
from kangaroo.utils.ranges import Count, DraftSize, Threshold, check_nodes


@dataclass
class KangarooTreeConfig(EarlyExitConfig):
    """Kangaroo's tree (arXiv 2404.18911): a node's confidence is the product of the probabilities
    on its path, and drafting stops once the best of a level falls to `threshold`.

    Args:
        top_k: nodes of a level, and candidates of each node (the paper's K).
        nodes: of the tree that is verified, the pending token aside: of those that pruning leaves,
            so many of the most confident.
        least: of the drafted nodes, verify those whose confidence is higher; null is the paper's
            pruning, all but the less confident half of the nodes without a child.
    """

    name: str = "kangaroo_tree"
    threshold: Threshold = 0.4
    top_k: Count = 10
    nodes: DraftSize = 32
    least: Threshold | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nodes(self.top_k * self.steps, top_k=self.top_k, steps=self.steps)

    def of(self, lm: LM, trained: Any, heads: list[DraftHead]) -> KangarooTree:
        """Errors: `ConfigError`."""
        options = self.steps, self.threshold, heads[0], self.top_k, self.nodes, self.least
        return KangarooTree(lm, trained, *options)


class KangarooTree(LayerTree):
    """Drafts by an adapter at the exit layer."""
