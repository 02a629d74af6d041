"""REST: a tree of what follows the last tokens of the text in a datastore.

Shapes: M occurrences, S steps, K prefixes of what follows them, N nodes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kangaroo.drafters import datastore
from kangaroo.drafters.base import Drafter, DrafterConfig, TreesFromText
from kangaroo.engine.batch import Batch
from kangaroo.engine.tree import Nodes
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, DraftSize

MIN_TOKENS = 2  # fewest tokens to look up


@dataclass
class RestConfig(DrafterConfig):
    """Retrieval-based speculative decoding (arXiv 2311.08252).

    Args:
        datastore: its folder, from `scripts/prepare.py datastore`.
        max_token_span: the most tokens at the end of the text to look up; if these do not occur,
            fewer are looked up, down to two.
        max_matches: the most occurrences to read. If there are more, evenly spaced ones are read,
            in the order of what follows them, which keeps its distribution.
        steps: tokens to read after each occurrence.
        num_draft: nodes of the tree without the root: the most frequent prefixes of what was read.
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
    """Drafts what follows the longest suffix of the text that the datastore has."""

    def __init__(self, store: datastore.Datastore, options: RestConfig):
        self.store = store
        self.options = options
        self.max_nodes = options.num_draft

    def tree_of(self, batch: Batch, row: int) -> Nodes:
        """The most frequent prefixes. Of equally frequent ones the shorter comes first, so that
        parents come before their children, and then the one that is earlier in the datastore."""
        starts_M, tokens_MS, valid_MS = self._occurrences(batch.texts[row])
        if not len(starts_M):
            return [], []
        # occurrences are in the order of what follows them, so equal prefixes are side by side
        differs_MS = np.ones_like(valid_MS)
        differs_MS[1:] = tokens_MS[1:] != tokens_MS[:-1]
        is_first_MS = np.logical_or.accumulate(differs_MS, axis=1)  # of all with its prefix
        levels = []  # of each node its token, parent, rank and first start
        nodes = 0
        parent_M = np.full(len(starts_M), -1)  # the node that each occurrence has reached
        for depth in range(self.options.steps):
            first_K = np.flatnonzero(is_first_MS[:, depth])
            counts_K = np.diff(first_K, append=len(starts_M))
            valid_K = valid_MS[first_K, depth]
            kept_K = first_K[valid_K]
            rank_K = counts_K[valid_K] * self.options.steps - depth
            start_K = np.minimum.reduceat(starts_M, first_K)[valid_K]
            levels.append((tokens_MS[kept_K, depth], parent_M[kept_K], rank_K, start_K))
            node_K = np.where(valid_K, nodes + np.cumsum(valid_K) - 1, -1)
            parent_M = np.repeat(node_K, counts_K)
            nodes += int(valid_K.sum())
        token_N, parent_N, rank_N, start_N = map(np.concatenate, zip(*levels, strict=True))
        # to sort thousands of nodes would take most of a step
        last = max(nodes - self.options.num_draft, 0)
        chosen = np.flatnonzero(rank_N >= np.partition(rank_N, last)[last])
        order = np.lexsort((start_N[chosen], -rank_N[chosen]))
        chosen = chosen[order][: self.options.num_draft]
        number = {int(node): i for i, node in enumerate(chosen, start=1)} | {-1: 0}
        return token_N[chosen].tolist(), [number[int(parent)] for parent in parent_N[chosen]]

    def _occurrences(self, text: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each occurrence where its continuation starts, the tokens from there on, and which of
        these belong to its document."""
        store = self.store
        options = self.options
        min_tokens = min(MIN_TOKENS, options.max_token_span)
        span, places = store.longest(text, options.max_token_span, min_tokens)
        count = min(len(places), options.max_matches)
        places_M = places.start + np.arange(count) * len(places) // max(count, 1)
        starts_M = store.suffixes_L[places_M].astype(np.int64) + span
        index_MS = starts_M[:, None] + np.arange(options.steps)
        # beyond the end the last token is read, a separator
        index_MS = index_MS.clip(max=len(store.tokens_L) - 1)
        tokens_MS = store.tokens_L[index_MS].astype(np.int64)
        return starts_M, tokens_MS, np.logical_and.accumulate(tokens_MS < store.separator, axis=1)
