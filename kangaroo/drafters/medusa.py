"""Medusa: heads on the target's final state guess the next tokens, and a static tree tries them.

Shapes: B rows, N draft nodes, D hidden size, K draft vocabulary, C candidates of a head.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from kangaroo.drafters.base import Drafter, TrainedConfig
from kangaroo.drafters.early_exit import take
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, Taps
from kangaroo.engine.tree import Draft, Tree, Verdict
from kangaroo.heads import adapter_files
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.medusa_heads import MedusaHeads
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, DraftSize

Choices = Sequence[tuple[int, ...]]


@dataclass
class MedusaConfig(TrainedConfig):
    """Medusa-1 with a sparse tree (arXiv 2401.10774, sections 2.1 and 2.3).

    Args:
        adapter: folder or hub id of trained heads (`python train.py adapter=medusa`).
        nodes: size of the tree, the pending token aside; the paper's has 63.
        top_k: guesses of each head that the tree may hold; 1 is a chain.
    """

    name: str = "medusa"
    nodes: DraftSize = 63
    top_k: Count = 10

    @classmethod
    def chain(cls, steps: int) -> Self:
        return cls(nodes=steps, top_k=1)

    def load(self, lm: TargetModel) -> tuple[MedusaHeads, list[DraftHead]]:
        return adapter_files.load(self.adapter, lm, MedusaHeads)

    def of(self, lm: TargetModel, trained: Any, heads: list[DraftHead]) -> Drafter:
        """Errors: `ConfigError`."""
        if self.top_k == 1:  # then it does not matter how often guesses are right
            guesses = [[1.0]] * trained.architecture.heads
        else:
            guesses = adapter_files.read_config(self.adapter).facts["guesses"]
        choices = sparse_tree([right[: self.top_k] for right in guesses], self.nodes)
        return Medusa(lm, trained, heads, choices)


def likeliest_paths(guesses: Sequence[Sequence[float]]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Paths of ranks and how often all of a path is right, the likeliest first, and a path after
    its beginnings, where `guesses[k][i]` says how often guess i of head k is right, by itself."""
    # of equals the shallower is first
    open_nodes: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    while open_nodes:
        value, depth, path = heapq.heappop(open_nodes)
        if path:
            yield path, -value
        if depth < len(guesses):
            for rank, right in enumerate(guesses[depth]):
                heapq.heappush(open_nodes, (value * right, depth + 1, (*path, rank)))


def sparse_tree(guesses: Sequence[Sequence[float]], nodes: int) -> Choices:
    """The tree of `nodes` nodes with the highest expected acceptance. Errors: `ConfigError` for no
    heads, or no guesses.

    Source: Medusa, arXiv 2401.10774, appendix on optimised tree construction.
    """
    if not guesses or not guesses[0]:
        raise ConfigError(
            "the heads' config.json does not say how often their guesses are right; train them "
            "again."
        )
    paths = [path for path, _ in islice(likeliest_paths(guesses), nodes)]
    return sorted(paths, key=lambda path: (len(path), path))


class Medusa(Drafter):
    """Reads the target's final state of the last token that is in the cache. There is an LM head
    for each head, or one for all; `choices` are the tree's nodes as paths of ranks, parents first.
    """

    def __init__(
        self, lm: TargetModel, heads: MedusaHeads, lm_heads: Sequence[DraftHead], choices: Choices
    ):
        self.lm, self.heads = lm, heads
        self.draft_heads = [head.accelerate(lm) for head in lm_heads]
        self.taps = (lm.n_layers,)
        self.max_nodes = len(choices)
        self.depth = max(map(len, choices))
        self.top_k = 1 + max(path[-1] for path in choices)
        index, device = {path: i for i, path in enumerate([(), *choices])}, lm.device
        self.head_N = torch.tensor([len(path) - 1 for path in choices], device=device)
        self.rank_N = torch.tensor([path[-1] for path in choices], device=device)
        parents_1N = torch.tensor([[0, *(index[path[:-1]] for path in choices)]], device=device)
        chain = Tree.chain(1 + len(choices), device)
        self.tree = chain if self.top_k == 1 else Tree(parents_1N, max_depth=self.depth)

    def begin(self, batch: Batch) -> None:
        size, here = (batch.size, self.lm.config.hidden_size), self.lm.layer_devices[-1]
        self.final_BD = torch.zeros(size, dtype=self.lm.dtype, device=here)

    def prefill(self, batch: Batch, tokens_1T: Tensor, meta: ForwardMeta, taps: Taps) -> None:
        self.final_BD[meta.rows] = taps[self.lm.n_layers][:, -1]

    def propose(self, batch: Batch) -> Draft:
        h_B1D = self.lm.norm(self.final_BD[:, None])
        guessed = []
        for index in range(self.depth):
            head = self.draft_heads[min(index, len(self.draft_heads) - 1)]
            logits_B1K = head(self.heads(h_B1D, index)[:, 0])[:, None]
            drawn_by = batch.length_B[:, None] + index, batch.sampling, batch.seeds_B
            guessed.append(head.candidates(logits_B1K, *drawn_by, self.top_k))
        drafted_BN = torch.cat(guessed, 1)[:, self.head_N, self.rank_N]
        tokens_BN = torch.cat([batch.last(1), drafted_BN], 1)
        return Draft(tokens_BN, self.tree, torch.ones_like(tokens_BN, dtype=torch.bool))

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Taps) -> None:
        states_BND = taps[self.lm.n_layers]
        last_B1 = verdict.path_BP[:, -1:].to(states_BND.device)
        self.final_BD = take(states_BND, last_B1)[:, 0]
