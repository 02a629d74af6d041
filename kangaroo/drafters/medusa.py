"""Medusa: heads on the target's final state guess the next tokens, which are put into a fixed tree.

Shapes: B rows, N draft nodes, D hidden size, K draft vocabulary.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from kangaroo.drafters.base import Drafter, TrainedConfig
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, Taps
from kangaroo.engine.tree import Draft, Tree, Verdict
from kangaroo.heads import adapter_files
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.medusa_heads import MedusaHeads
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, DraftSize

Path = tuple[int, ...]  # a node: the rank of each token on its path among the head's guesses
Paths = Sequence[Path]


@dataclass
class MedusaConfig(TrainedConfig):
    """Medusa-1 with a sparse tree (arXiv 2401.10774, sections 2.1 and 2.3).

    Args:
        adapter: folder or hub id of trained heads (`python train.py adapter=medusa`).
        nodes: the size of the tree without the pending token (63 in the paper).
        top_k: the most guesses of each head in the tree; 1 is a chain.
    """

    name: str = "medusa"
    nodes: DraftSize = 63
    top_k: Count = 10

    def build(self, lm: TargetModel) -> Drafter:
        """Errors: as `adapter_files.load`; `ConfigError`."""
        trained, heads = adapter_files.load(self.adapter, lm, MedusaHeads)
        if self.top_k == 1:  # a chain, however often guesses are right
            chances = [[1.0]] * trained.architecture.heads
        else:
            chances = adapter_files.read_config(self.adapter).facts.get("guesses", [])
        paths = sparse_tree([ranked[: self.top_k] for ranked in chances], self.nodes)
        return Medusa(lm, trained, heads, paths)


def likeliest_paths(chances: Sequence[Sequence[float]]) -> Iterator[tuple[Path, float]]:
    """Paths, each with the chance that all of it is right: the likeliest first, and a path after
    its prefixes. `chances[k][i]` is how often guess i of head k is right, by itself."""
    heap: list[tuple[float, int, Path]] = [(-1.0, 0, ())]  # of equals the shallower comes first
    while heap:
        value, depth, path = heapq.heappop(heap)
        if path:
            yield path, -value
        if depth < len(chances):
            for rank, chance in enumerate(chances[depth]):
                heapq.heappush(heap, (value * chance, depth + 1, (*path, rank)))


def sparse_tree(chances: Sequence[Sequence[float]], nodes: int) -> Paths:
    """The tree of `nodes` nodes with the highest expected acceptance (Medusa, arXiv 2401.10774,
    the appendix on optimised trees). Errors: `ConfigError` without chances."""
    if not chances or not chances[0]:
        raise ConfigError(
            "the heads' config.json does not say how often their guesses are right: train the "
            "heads again."
        )
    paths = [path for path, _ in islice(likeliest_paths(chances), nodes)]
    return sorted(paths, key=lambda path: (len(path), path))


class Medusa(Drafter):
    """Guesses from the target's final state of the last token in the cache. `lm_heads` has an LM
    head for each of the heads, or one for all; `paths` has the tree's nodes, parents first."""

    def __init__(
        self, lm: TargetModel, heads: MedusaHeads, lm_heads: Sequence[DraftHead], paths: Paths
    ):
        self.lm = lm
        self.heads = heads
        self.taps = (lm.n_layers,)
        self.draft_heads = [head.accelerate(lm) for head in lm_heads]
        self.max_nodes = len(paths)
        self.depth = max(map(len, paths))
        self.top_k = 1 + max(path[-1] for path in paths)
        self.head_N = torch.tensor([len(path) - 1 for path in paths], device=lm.device)
        self.rank_N = torch.tensor([path[-1] for path in paths], device=lm.device)
        if self.top_k == 1:
            self.tree = Tree.chain(1 + len(paths), lm.device)
        else:
            number = {path: i for i, path in enumerate([(), *paths])}
            parents = [0, *(number[path[:-1]] for path in paths)]
            self.tree = Tree(torch.tensor([parents], device=lm.device), max_depth=self.depth)

    def begin(self, batch: Batch) -> None:
        shape = (batch.size, self.lm.config.hidden_size)
        self.final_BD = torch.zeros(shape, dtype=self.lm.dtype, device=self.lm.layer_devices[-1])

    def prefill(self, batch: Batch, tokens_1T: Tensor, meta: ForwardMeta, taps: Taps) -> None:
        self.final_BD[meta.rows] = taps[self.lm.n_layers][:, -1]

    def propose(self, batch: Batch) -> Draft:
        h_B1D = self.lm.norm(self.final_BD[:, None])
        guesses = []
        for index in range(self.depth):
            head = self.draft_heads[min(index, len(self.draft_heads) - 1)]
            logits_B1K = head(self.heads(h_B1D, index)[:, 0])[:, None]
            at_B1 = batch.length_B[:, None] + index
            guesses.append(
                head.candidates(logits_B1K, at_B1, batch.sampling, batch.seeds_B, count=self.top_k)
            )
        drafted_BN = torch.cat(guesses, 1)[:, self.head_N, self.rank_N]
        tokens_BN = torch.cat([batch.last(1), drafted_BN], 1)
        return Draft(tokens_BN, self.tree, torch.ones_like(tokens_BN, dtype=torch.bool))

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Taps) -> None:
        states_BND = taps[self.lm.n_layers]
        last_B11 = verdict.path_BP[:, -1:, None].to(states_BND.device)
        self.final_BD = states_BND.take_along_dim(last_B11, 1)[:, 0]
