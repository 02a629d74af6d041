"""Hybrid: one tree from what the text itself says and what Kangaroo drafts.

Shapes: B rows, C choices for a token, K draft vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kangaroo.drafters import expected_gain
from kangaroo.drafters.base import Drafter, EarlyExitConfig, RowStates
from kangaroo.drafters.expected_gain import Costs, DraftedChain, Lookup, Recycled, Sources
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.suffix import AnswerStore
from kangaroo.drafters.token_recycling import recycle, successors_in
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget
from kangaroo.engine.sampling import BatchSampling
from kangaroo.engine.tree import Draft
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import CountOrZero, DraftSize, Positive

CANDIDATES = 3  # for each token of the chain


@dataclass
class HybridConfig(EarlyExitConfig):
    """One tree from several sources, whose nodes are chosen by expected gain.

    Args:
        threshold: as for Kangaroo; with `auto` and 0 the expected gain alone ends the chain.
        nodes: the most nodes of the tree, without the pending token.
        min_gain_per_step: tokens that further work must gain in the time of a vanilla step.
        recycle: where no other source has candidates, use the likeliest successor at the token's
            last occurrence (Token Recycling, arXiv 2408.08696).
        store_tokens: also search this many tokens of earlier answers, as `suffix` does.
    """

    name: str = "hybrid"
    nodes: DraftSize = 15
    min_gain_per_step: Positive = 1.25
    recycle: bool = False
    store_tokens: CountOrZero = 0

    def of(self, lm: TargetModel, trained: Any, heads: list[DraftHead]) -> Drafter:
        of_chain = self.steps, self.threshold, heads[0], None
        of_tree = self.min_gain_per_step, self.nodes, self.recycle, self.store_tokens
        return Hybrid(lm, trained, *of_chain, *of_tree)


class Hybrid(Kangaroo):
    """Verifies the candidates of its sources that pay; where a lookup is nearly sure, it drafts
    nothing. Costs are measured, unless given as `costs` of at least `nodes` nodes."""

    reads_logits = True  # for the second and third candidates

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
        recycle: bool = False,
        store_tokens: int = 0,
    ):
        super().__init__(lm, adapter, steps, threshold, head)
        self.nodes, self.min_gain_per_step = nodes, min_gain_per_step
        self.needs_costs = costs is None
        self.costs = costs or Costs([1.0] * (nodes + 1), self.draft_cost, min_gain_per_step)
        self.max_nodes = max(nodes, steps)
        self.recycle, self.store = recycle, AnswerStore(store_tokens)

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.store.begin()
        self.rows = RowStates(self.start_text)
        batch.likeliest = max(batch.likeliest, int(self.recycle))

    def take_costs(self, budget: Budget, rows: int, shared_states: bool) -> None:
        """Measure the costs of a round of `rows` rows; with `shared_states` the shallow states of
        the lookup's tokens are computed together with the pending token's."""
        if self.needs_costs:
            states = self.shallow_cost if shared_states else 0.0
            verify = budget.cost(rows, self.nodes)
            self.costs = Costs(verify, self.draft_cost, self.min_gain_per_step, states)

    def propose(self, batch: Batch) -> Draft:
        self.take_costs(batch.budget, len(batch.active), shared_states=False)
        sources = {row: self.update_sources(batch, row) for row in batch.active}
        self._draft_chains(batch, sources)
        best = partial(expected_gain.best_tree, self.costs, most=self.nodes)
        return Draft.listed(batch.last(1), {row: best(sources[row]) for row in sources})

    def start_text(self, row: int, text: list[int]) -> Sources:
        """The sources of a new text."""
        lookups = [Lookup() for _ in self.store.matches(row, text)]
        recycled = Recycled(successors_in(text, 1)) if self.recycle else None
        return Sources(lookups, DraftedChain(), recycled, len(text))

    def update_sources(self, batch: Batch, row: int) -> Sources:
        """The sources of a row at the start of a round: they have learnt from the last one, the
        lookups are new, and the chain is empty."""
        text = batch.texts[row]
        sources = self.rows.of(row, text)
        sources.learn(text[sources.length :])
        sources.length = len(text)
        for lookup, part in zip(sources.lookups, self.store.matches(row, text), strict=True):
            lookup.match(part.match[0], part.continuation(self.nodes, batch.ends[row]))
        sources.chain.replace([])
        if sources.recycled is not None:
            sources.recycled.start = text[-1]
            recycle(sources.recycled.matrix, batch, row)
        return sources

    def _draft_chains(self, batch: Batch, sources: dict[int, Sources]) -> None:
        """Draft each row's chain for as long as that pays."""
        growing = [row for row in sources if self.pays(sources[row])]
        if not growing:
            return
        meta = self.chain_meta(batch, self.steps, self.steps)
        for token in self.tokens(batch, meta):
            ranked = token.reading.tolist()  # one sync
            for row in growing:
                sources[row].chain.append([(int(token), chance) for token, chance in ranked[row]])
            growing = [row for row in growing if self.pays(sources[row])]
            if not growing:
                break
        self.hidden = []  # verification begins at the embeddings

    def pays(self, sources: Sources) -> bool:
        """Whether one more token of the chain is expected to pay."""
        is_sure = sources.chain.confidence > self.threshold
        return is_sure and expected_gain.drafting_pays(self.costs, sources, self.nodes)

    def reading(
        self, logits_BK: Tensor, sampling: BatchSampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """The candidates for each row's next token, and the probabilities of their ranks before
        temperature and noise: `[B, C, 2]`."""
        count = min(CANDIDATES, self.head.size)
        probs_BC = logits_BK.float().softmax(-1).topk(count).values
        ids_BC = self.head.candidates(logits_BK[:, None], positions_B1, sampling, seeds_B, count)
        return torch.stack([ids_BC[:, 0].double(), probs_BC.double()], -1)
