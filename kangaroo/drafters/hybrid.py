"""Hybrid: one tree from what the text itself says and what Kangaroo drafts.

Shapes: B rows, C choices for a token, K draft vocabulary.
"""

from dataclasses import dataclass
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

CHOICES = 3  # for a token of the chain: the best, and two further ones


@dataclass
class HybridConfig(EarlyExitConfig):
    """One tree from several sources, its nodes chosen by expected gain.

    Args:
        threshold: as of Kangaroo; with `auto` and 0 the expected gain alone ends the chain.
        nodes: of the tree that is verified, the pending token aside: at most this many.
        min_gain_per_step: tokens that decoding writes in the time of a vanilla step: what further
            work in a round has to be worth.
        recycle: where other sources are silent, what was likeliest where the last token stood
            before is a candidate, as in Token Recycling (arXiv 2408.08696).
        store_tokens: so many tokens of earlier answers are looked up too, as of `suffix`.
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
    """Verifies what its sources say, as far as that is worth its place. Where a lookup is nearly
    sure, nothing is drafted. Without `costs`, of at least `nodes` nodes, they are measured."""

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
        """Those of a round of so many rows, where they are measured; with `shared_states` those of
        what the lookup says are computed with the pending token's."""
        if self.needs_costs:
            states = self.shallow_cost if shared_states else 0.0
            verify = budget.cost(rows, self.nodes)
            self.costs = Costs(verify, self.draft_cost, self.min_gain_per_step, states)

    def propose(self, batch: Batch) -> Draft:
        self.take_costs(batch.budget, len(batch.active), shared_states=False)
        sources = {row: self.asked(batch, row) for row in batch.active}
        self._draft_chains(batch, sources)
        trees = {
            row: expected_gain.best_tree(self.costs, x, self.nodes) for row, x in sources.items()
        }
        return Draft.listed(batch.last(1), trees)

    def start_text(self, row: int, text: list[int]) -> Sources:
        """What is asked of a row's text."""
        lookups = [Lookup() for _ in self.store.matches(row, text)]
        recycled = Recycled(successors_in(text, 1)) if self.recycle else None
        return Sources(lookups, DraftedChain(), recycled, len(text))

    def asked(self, batch: Batch, row: int) -> Sources:
        """What is said of a row in a new round, but for the chain, up to where its text ends; the
        sources have learnt what the last round came to."""
        text = batch.texts[row]
        sources = self.rows.of(row, text)
        sources.learn(text[sources.length :])
        sources.length = len(text)
        for lookup, part in zip(sources.lookups, self.store.matches(row, text), strict=True):
            lookup.look_up(part.match[0], part.continuation(self.nodes, batch.ends[row]))
        sources.chain.say([])
        if sources.recycled is not None:
            sources.recycled.start = text[-1]
            recycle(sources.recycled.matrix, batch, row)
        return sources

    def _draft_chains(self, batch: Batch, sources: dict[int, Sources]) -> None:
        """Add to each row's sources a chain, as long as that pays."""
        growing = [row for row in sources if self.pays(sources[row])]
        if not growing:
            return
        meta = self.chain_meta(batch, self.steps, self.steps)
        for token in self.tokens(batch, meta):
            choices = token.reading.tolist()  # one sync
            for row in growing:
                sources[row].chain.add([(int(token), chance) for token, chance in choices[row]])
            growing = [row for row in growing if self.pays(sources[row])]
            if not growing:
                break
        self.hidden = []  # verification begins at the embeddings

    def pays(self, sources: Sources) -> bool:
        """Whether a further token of the chain may be expected to pay."""
        goes_on = sources.chain.confidence > self.threshold
        return goes_on and expected_gain.drafting_pays(self.costs, sources, self.nodes)

    def reading(
        self, logits_BK: Tensor, sampling: BatchSampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """The best choices for each row's next token, and the probabilities of their ranks, which
        know nothing of temperature and noise: `[B, C, 2]`."""
        count = min(CHOICES, self.head.size)
        probs_BC = logits_BK.float().softmax(-1).topk(count).values
        ids_BC = self.head.candidates(logits_BK[:, None], positions_B1, sampling, seeds_B, count)
        return torch.stack([ids_BC[:, 0].double(), probs_BC.double()], -1)
