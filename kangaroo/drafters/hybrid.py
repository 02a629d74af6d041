"""Hybrid: one tree from what the text itself says and what Kangaroo drafts.

Shapes: B rows, C choices for a token, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kangaroo.drafters.base import EarlyExitConfig
from kangaroo.drafters.chain import chain_meta
from kangaroo.drafters.expected_gain import Chances, Costs, Sources, best_tree, drafting_pays
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.suffix import SuffixAutomaton
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget
from kangaroo.engine.sampling import AnySampling
from kangaroo.engine.tree import Draft
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import DraftSize, Positive

CHOICES = 3  # for a token of the chain: the best, and two further ones


@dataclass
class HybridConfig(EarlyExitConfig):
    """One tree from a lookup and from Kangaroo's chain, its nodes chosen by expected gain.

    Args:
        threshold: as of Kangaroo; with `auto` and 0 the expected gain alone ends the chain.
        nodes: of the tree that is verified, the pending token aside: at most this many.
        min_gain_per_step: tokens that decoding writes in the time of a vanilla step: what further
            work in a round has to be worth.
    """

    name: str = "hybrid"
    nodes: DraftSize = 15
    min_gain_per_step: Positive = 1.25

    def of(self, lm: TargetModel, trained: Any, heads: list[DraftHead]) -> Hybrid:
        gain, first = self.min_gain_per_step, heads[0]
        return Hybrid(lm, trained, self.steps, self.threshold, first, None, gain, self.nodes)


class Lookup:
    """What followed the end of a text, which grows elsewhere, where it stood before; and what has
    come true in it."""

    def __init__(self, text: list[int]):
        self.text, self.automaton, self.chances = text, SuffixAutomaton(text), Chances()
        self.last: tuple[int, Sources] | None = None  # a round's, and how long the text was then

    def sources(self, count: int, ends: Container[int]) -> Sources:
        """Of a new round, at most `count` tokens of the lookup, up to one that `ends` the text, and
        no chain yet; the chances learn from what the last round has come to."""
        if self.last is not None:
            length, sources = self.last
            sources.learn(self.text[length:])
        self.automaton.extend(self.text[len(self.automaton.tokens) :])
        match, _ = self.automaton.match
        tokens = self.automaton.continuation(count, ends)
        self.last = len(self.text), Sources(self.chances, match, tokens)
        return self.last[1]


class Hybrid(Kangaroo):
    """Verifies what the lookup found, the chain from the same root, and the next best choices for
    its tokens, as far as they are worth their place. Where the lookup is nearly sure, nothing is
    drafted. Without `costs`, of at least `nodes` nodes, they are measured.
    """

    reads_logits = True  # for the next best choices

    def __init__(
        self,
        lm: TargetModel,
        adapter: Layer,
        steps: int = 6,
        threshold: float | str = 0.0,
        head: DraftHead | None = None,
        costs: Costs | None = None,
        min_gain_per_step: float = 1.25,
        nodes: int = 15,
    ):
        super().__init__(lm, adapter, steps, threshold, head)
        self.nodes, self.min_gain_per_step = nodes, min_gain_per_step
        self.needs_costs = costs is None
        self.costs = costs or Costs([1.0] * (nodes + 1), self.draft_cost, min_gain_per_step)
        self.max_nodes = max(nodes, steps)
        self.lookups: list[Lookup] = []

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.lookups = [Lookup(text) for text in batch.texts]

    def take_costs(self, budget: Budget, rows: int, shared_states: bool) -> None:
        """Those of a round of so many rows, where they are measured; with `shared_states` those of
        what the lookup says are computed with the pending token's."""
        if self.needs_costs:
            states = self.shallow_cost if shared_states else 0.0
            verify = budget.cost(rows, self.nodes)
            self.costs = Costs(verify, self.draft_cost, self.min_gain_per_step, states)

    def propose(self, batch: Batch) -> Draft:
        self.take_costs(batch.budget, batch.active, shared_states=False)
        sources = [
            None if done else self.looked_up(batch, row) for row, done in enumerate(batch.done)
        ]
        self._draft_chains(batch, sources)
        trees = [best_tree(self.costs, x, self.nodes) if x else ([], []) for x in sources]
        tokens, parents = [nodes for nodes, _ in trees], [above for _, above in trees]
        chains = all(above == list(range(len(above))) for above in parents)
        return Draft.listed(batch.last(1), tokens, None if chains else parents)

    def looked_up(self, batch: Batch, row: int) -> Sources:
        """What the lookup says of a row, up to where its text would end."""
        text = batch.texts[row]
        if self.lookups[row].text is not text:  # another prompt has taken the row
            self.lookups[row] = Lookup(text)
        return self.lookups[row].sources(self.nodes, batch.ends[row])

    def _draft_chains(self, batch: Batch, sources: Sequence[Sources | None]) -> None:
        """Add to each row's sources a chain, as long as that pays."""
        growing = {row: said for row, said in enumerate(sources) if said and self.pays(said)}
        if not growing:
            return
        meta = chain_meta(self.lm, batch, self.window, self.steps)
        for token in self.tokens(batch, meta):
            choices = token.reading.tolist()  # one sync
            for row, said in growing.items():
                said.add([(int(token), chance) for token, chance in choices[row]])
            growing = {row: said for row, said in growing.items() if self.pays(said)}
            if not growing:
                break
        self.hidden = []  # verification begins at the embeddings

    def pays(self, sources: Sources) -> bool:
        """Whether a further token of the chain may be expected to pay."""
        goes_on = not sources.chain or sources.confidence[-1] > self.threshold
        return goes_on and drafting_pays(self.costs, sources, self.nodes)

    def reading(
        self, logits_BK: Tensor, sampling: AnySampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """The best choices for each row's next token, and the probabilities of their ranks, which
        know nothing of temperature and noise: `[B, C, 2]`."""
        count = min(CHOICES, self.head.size)
        probs_BC = logits_BK.float().softmax(-1).topk(count).values
        ids_BC = self.head.candidates(logits_BK[:, None], positions_B1, sampling, seeds_B, count)
        return torch.stack([ids_BC[:, 0].double(), probs_BC.double()], -1)
