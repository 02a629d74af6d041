"""Hybrid: one tree, from lookups in the text and from Kangaroo's chain.

Shapes: B rows, C choices for a token, K draft vocabulary.
"""

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kangaroo.drafters import expected_gain
from kangaroo.drafters.base import Drafter, EarlyExitConfig, RowStates, TreesFromText
from kangaroo.drafters.expected_gain import Costs, DraftedChain, Lookup, Sources
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.suffix import SuffixAutomaton
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget
from kangaroo.engine.sampling import BatchSampling
from kangaroo.engine.tree import Draft, Nodes
from kangaroo.heads import adapter_files
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import DraftSize, Positive

CHOICES = 3  # candidates for each token of the chain
SURE = 0.75  # if not even tokens of this chance pay, sources are not asked: that takes time, too

_warn_once = cache(logging.getLogger(__name__).warning)


@dataclass
class HybridConfig(EarlyExitConfig):
    """One tree from several sources, its nodes chosen by expected gain. Without an adapter there is
    no chain among the sources.

    Args:
        adapter: null stands for none, as a default does that is not there.
        threshold: as in Kangaroo; with `auto` and 0 only the expected gain ends the chain.
        nodes: the most nodes of the verified tree, without the pending token.
        min_gain_per_step: tokens that work in a round must gain per vanilla step that it takes.
    """

    name: str = "hybrid"
    adapter: str | None = "???"  # type: ignore[assignment]  # the others need one
    nodes: DraftSize = 15
    min_gain_per_step: Positive = 1.25

    @property
    def trained(self) -> str | None:
        if self.adapter is None or adapter_files.absence(self.adapter):
            return None
        return super().trained

    def build(self, lm: TargetModel) -> Drafter:
        if self.adapter is None:
            return TextHybrid(self)
        if (reason := adapter_files.absence(self.adapter)) is not None:
            _warn_once(f"drafter=hybrid drafts from the text alone: {reason}")
            return TextHybrid(self)
        layer, head = self.load(lm)
        return Hybrid(lm, layer, self, head)


class FromSources(Drafter):
    """Drafts the candidates of its sources that are worth their cost."""

    costs: Costs  # of the round
    draft_cost = shallow_cost = 0.0  # of a drafted token

    def use(self, options: HybridConfig) -> None:
        """Set the options of a new drafter."""
        self.options = options
        self.nodes = options.nodes
        self.needs_costs = True

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.automata = RowStates(lambda row, text: SuffixAutomaton())
        self.rows = RowStates(lambda row, text: Sources(Lookup(), DraftedChain(), len(text)))

    def update_costs(self, budget: Budget, rows: int, native_share: float | None = None) -> None:
        """Set the costs of a round with so many rows. In native code drafting takes `native_share`
        of what it costs on tensors, and one pass computes the shallow states of the lookup's tokens
        and of the pending token."""
        self.costs = Costs(
            verify=budget.cost(rows, self.nodes),
            draft=(native_share or 1.0) * self.draft_cost,
            min_gain_per_step=self.options.min_gain_per_step,
            states=(native_share or 0.0) * self.shallow_cost,
        )

    @property
    def may_pay(self) -> bool:
        """Whether a sure token would pay; otherwise sources need not be updated, nor prompts read.
        What they miss, they learn later."""
        return self.costs.min_chance < SURE

    def update_sources(self, batch: Batch, row: int) -> Sources:
        """A row's sources for a new round; they have learned from the last one, without a chain."""
        text = batch.texts[row]
        sources = self.rows.get(row, text)
        sources.learn(text[sources.length :])
        sources.length = len(text)
        automaton = self.automata.get(row, text)
        automaton.follow(text)
        continuation = automaton.continuation(self.nodes, batch.ends[row])
        sources.lookup.set_match(automaton.length, continuation)
        sources.chain.set_tokens([])
        return sources


class TextHybrid(FromSources, TreesFromText):
    """The hybrid without an adapter."""

    def __init__(self, options: HybridConfig):
        self.use(options)
        self.max_nodes = self.nodes

    def tree_of(self, batch: Batch, row: int) -> Nodes:
        self.update_costs(batch.budget, len(batch.active))
        if not self.may_pay:
            return [], []
        return expected_gain.best_tree(self.costs, self.update_sources(batch, row), self.nodes)


class Hybrid(FromSources, Kangaroo):
    """The hybrid with an adapter, which drafts nothing if a lookup is nearly sure."""

    keeps_probs = False
    reads_logits = True  # for the alternatives

    def __init__(
        self, lm: TargetModel, adapter: Layer, options: HybridConfig, head: DraftHead | None = None
    ):
        super().__init__(lm, adapter, options, head)
        self.use(options)
        self.max_nodes = max(self.nodes, self.steps)

    def propose(self, batch: Batch) -> Draft:
        self.update_costs(batch.budget, len(batch.active))
        if not self.may_pay:
            return Draft.nothing(batch.last(1))
        sources = {row: self.update_sources(batch, row) for row in batch.active}
        self._draft_chains(batch, sources)
        trees = {}
        for row, source in sources.items():
            trees[row] = expected_gain.best_tree(self.costs, source, self.nodes)
        return Draft.listed(batch.last(1), trees)

    def _draft_chains(self, batch: Batch, sources: dict[int, Sources]) -> None:
        growing = [row for row in sources if self.pays(sources[row])]
        if not growing:
            return
        for token in self.tokens(batch, self.chain_meta(batch, self.steps, self.steps)):
            choices = token.reading.tolist()  # one sync
            for row in growing:
                sources[row].chain.add([(int(token), chance) for token, chance in choices[row]])
            growing = [row for row in growing if self.pays(sources[row])]
            if not growing:
                break
        self.hidden = []  # verification begins at the embeddings

    def pays(self, sources: Sources) -> bool:
        """Whether another token of the chain is expected to pay."""
        confident = sources.chain.confidence > self.threshold
        return confident and expected_gain.drafting_pays(self.costs, sources, self.nodes)

    def reading(
        self, logits_BK: Tensor, sampling: BatchSampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """Each row's best candidates, and their ranks' probabilities without noise, `[B, C, 2]`."""
        count = min(CHOICES, self.head.size)
        probs_BC = logits_BK.float().softmax(-1).topk(count).values
        ids_BC = self.head.candidates(logits_BK[:, None], positions_B1, sampling, seeds_B, count)
        return torch.stack([ids_BC[:, 0].double(), probs_BC.double()], -1)
