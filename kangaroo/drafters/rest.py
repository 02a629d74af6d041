"""REST: a tree of what follows the text's last tokens in a datastore.

Shapes: M occurrences, S steps, K prefixes of what follows them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kangaroo.drafters import datastore
from kangaroo.drafters.base import Drafter, DrafterConfig, TreesFromText
from kangaroo.drafters.datastore import Datastore
from kangaroo.engine.batch import Batch
from kangaroo.engine.tree import Nodes
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, DraftSize

FEWEST_TOKENS = 2  # that are looked for


@dataclass
class RestConfig(DrafterConfig):
    """Retrieval-based speculative decoding (arXiv 2311.08252).

    Args:
        datastore: its folder, from `scripts/prepare.py datastore`.
        max_token_span: tokens at the end of the text that are looked for; where they stand nowhere,
            fewer, but two at least.
        max_matches: occurrences that are read; of more, as many evenly spaced ones in the order of
            what follows them, which keeps its distribution.
        steps: tokens read after each.
        num_draft: nodes of the tree, the root aside: the most frequent prefixes of what was read.
    """

    name: str = "rest"
    datastore: str = "???"
    max_token_span: Count = 16
    max_matches: Count = 1000
    steps: DraftSize = 10
    num_draft: DraftSize = 64

    def build(self, lm: TargetModel) -> Drafter:
        """Errors: those of `datastore.load`."""
        return Rest(datastore.load(self.datastore, lm), self)

    def settings(self) -> dict[str, Any]:
        fingerprint = str(datastore.read_about(self.datastore).get("fingerprint"))
        return super().settings() | {"fingerprint": fingerprint}


class Rest(TreesFromText):
    """Looks up the longest end of the text that the datastore has, and drafts what follows there.
    Of the options `datastore` is not read; that is `store`."""

    def __init__(self, store: Datastore, options: RestConfig):
        self.store, self.options = store, options
        self.max_nodes = options.num_draft

    def tree_of(self, batch: Batch, row: int) -> Nodes:
        """The most frequent prefixes. Of equally frequent ones the shallower comes first, then the
        one that stands earlier in the datastore. So parents come before their children, and are in
        the tree wherever these are."""
        starts_M, follows_MS, goes_on_MS = self._occurrences(batch.texts[row])
        if not len(starts_M):
            return [], []
        # occurrences come in the order of what follows: equal prefixes lie side by side
        differs_MS = np.ones_like(goes_on_MS)
        differs_MS[1:] = follows_MS[1:] != follows_MS[:-1]
        begins_MS = np.logical_or.accumulate(differs_MS, axis=1)
        tokens, parents, ranks, places, nodes = [], [], [], [], 0
        above_M = np.full(len(starts_M), -1)  # the node that each occurrence has reached
        for depth in range(self.options.steps):
            first_K = np.flatnonzero(begins_MS[:, depth])
            counts_K = np.diff(first_K, append=len(starts_M))
            kept_K = goes_on_MS[first_K, depth]
            tokens.append(follows_MS[first_K[kept_K], depth])
            parents.append(above_M[first_K[kept_K]])
            ranks.append(counts_K[kept_K] * self.options.steps - depth)
            places.append(np.minimum.reduceat(starts_M, first_K)[kept_K])
            node_K = np.where(kept_K, nodes + np.cumsum(kept_K) - 1, -1)
            above_M = np.repeat(node_K, counts_K)
            nodes += int(kept_K.sum())
        rank_K = np.concatenate(ranks)
        # sorting them all would cost most of a step where there are thousands
        best = max(nodes - self.options.num_draft, 0)
        chosen = np.flatnonzero(rank_K >= np.partition(rank_K, best)[best])
        order = np.lexsort((np.concatenate(places)[chosen], -rank_K[chosen]))
        chosen = chosen[order][: self.options.num_draft]
        number = {int(node): i for i, node in enumerate(chosen, start=1)} | {-1: 0}
        below = [number[int(parent)] for parent in np.concatenate(parents)[chosen]]
        return np.concatenate(tokens)[chosen].tolist(), below

    def _occurrences(self, text: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where what follows the text's end starts, its tokens, and which are of that document."""
        store, options = self.store, self.options
        fewest = min(FEWEST_TOKENS, options.max_token_span)
        span, places = store.longest(text, options.max_token_span, fewest)
        count = min(len(places), options.max_matches)
        places_M = places.start + np.arange(count) * len(places) // max(count, 1)
        starts_M = store.suffixes_L[places_M].astype(np.int64) + span
        index_MS = starts_M[:, None] + np.arange(options.steps)
        # the last token is a separator, so what is read beyond the end ends there
        follows_MS = store.tokens_L[np.minimum(index_MS, len(store.tokens_L) - 1)].astype(np.int64)
        goes_on_MS = np.logical_and.accumulate(follows_MS != store.separator, axis=1)
        return starts_M, follows_MS, goes_on_MS
