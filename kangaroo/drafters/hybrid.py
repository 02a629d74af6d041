"""Hybrid: one tree from what the text itself says and what Kangaroo drafts.

Shapes: B rows, C choices for a token, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kangaroo.drafters import datastore
from kangaroo.drafters.chain import chain_meta
from kangaroo.drafters.datastore import Datastore
from kangaroo.drafters.early_exit import EarlyExitConfig
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
REFERENCE_SPAN = 16  # tokens at the end of a text that a reference is searched for


@dataclass
class HybridConfig(EarlyExitConfig):
    """One tree from a lookup and from Kangaroo's chain, its nodes chosen by expected gain.

    Args:
        threshold: as of Kangaroo; with `auto` and 0 the expected gain alone ends the chain.
        nodes: of the tree that is verified, the pending token aside: at most this many.
        min_gain_per_step: tokens that decoding writes in the time of a vanilla step: what further
            work in a round has to be worth.
        reference: folder of a datastore (`scripts/prepare.py datastore`) that is searched for
            longer matches than the text has itself; null searches the text alone.
    """

    name: str = "hybrid"
    nodes: DraftSize = 15
    min_gain_per_step: Positive = 1.25
    reference: str | None = None

    def of(self, lm: TargetModel, trained: Any, heads: list[DraftHead]) -> Hybrid:
        """Errors: `ConfigError`, and those of `datastore.load`."""
        reference = None if self.reference is None else datastore.load(self.reference, lm)
        return Hybrid(
            lm,
            trained,
            self.steps,
            self.threshold,
            heads[0],
            min_gain_per_step=self.min_gain_per_step,
            nodes=self.nodes,
            reference=reference,
        )

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        if self.reference is not None:
            settings["fingerprint"] = datastore.fingerprint(self.reference)
        return settings


class Lookup:
    """What followed the end of a growing text where it stood before, and what has come true in it.

    Args:
        text: grows elsewhere.
        reference: searched for longer matches.
    """

    def __init__(self, text: list[int], reference: Datastore | None = None):
        self.text, self.reference = text, reference
        self.automaton = SuffixAutomaton(text)
        self.chances = Chances()
        self.last: tuple[int, Sources] | None = None  # a round's, and how long the text was then

    def sources(self, count: int, ends: Container[int]) -> Sources:
        """Of a new round, at most `count` tokens of the lookup and no chain yet; the chances learn
        from what the last one has come to.

        Args:
            ends: the tokens that end the text.
        """
        if self.last is not None:
            length, sources = self.last
            sources.learn(self.text[length:])
        match, tokens = self.find(count)
        end = next((i for i, token in enumerate(tokens, 1) if token in ends), None)
        self.last = len(self.text), Sources(self.chances, match, tokens[:end])
        return self.last[1]

    def find(self, count: int) -> tuple[int, list[int]]:
        """How long the match is, and at most `count` tokens that followed it; 0 and none where
        there is no match."""
        self.automaton.extend(self.text[len(self.automaton.tokens) :])
        length, _ = self.automaton.match
        if self.reference is not None and length < REFERENCE_SPAN:
            span, places = self.reference.longest(self.text, REFERENCE_SPAN, length + 1)
            if places:
                # places lie in the order of what follows: what follows at most of them is in the
                # middle
                middle = places[len(places) // 2]
                start = int(self.reference.suffixes_L[middle]) + span
                return span, self.reference.after(start, count)
        return length, self.automaton.continuation(count)


class Hybrid(Kangaroo):
    """Verifies what the lookup found, the chain from the same root, and the next best choices for
    its tokens, as far as they are worth their place.

    Where the lookup is nearly sure, nothing is drafted.

    Args:
        costs: of at least `nodes` nodes; None is measured, once for each device and number of
            threads.
        min_gain_per_step: as of `HybridConfig`, for costs that are measured.
        nodes: at most this many, the root aside.
    """

    reads_logits = True  # for the next best choices

    def __init__(
        self,
        lm: TargetModel,
        adapter: Layer,
        steps: int = 6,
        threshold: float | str = 0.0,
        head: DraftHead | None = None,
        *,
        costs: Costs | None = None,
        min_gain_per_step: float = 1.25,
        nodes: int = 15,
        reference: Datastore | None = None,
    ):
        super().__init__(lm, adapter, steps, threshold, head)
        self.nodes, self.reference, self.min_gain_per_step = nodes, reference, min_gain_per_step
        self.needs_costs = costs is None
        self.costs = costs or Costs([1.0] * (nodes + 1), self.draft_cost, min_gain_per_step)
        self.max_nodes = max(nodes, steps)
        self.lookups: list[Lookup] = []

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.lookups = [Lookup(text, self.reference) for text in batch.texts]

    def take_costs(self, budget: Budget, rows: int, shared_states: bool) -> None:
        """Those of a round of so many rows, where they are measured.

        Args:
            shared_states: the states of what the lookup says are computed with the pending token's.
        """
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
        trees = [([], []) if source is None else self.tree(source) for source in sources]
        tokens, parents = [nodes for nodes, _ in trees], [above for _, above in trees]
        chains = all(above == list(range(len(above))) for above in parents)
        return Draft.listed(batch.last(1), tokens, None if chains else parents)

    def looked_up(self, batch: Batch, row: int) -> Sources:
        """What the lookup says of a row, up to where its text would end."""
        text = batch.texts[row]
        if self.lookups[row].text is not text:  # another prompt has taken the row
            self.lookups[row] = Lookup(text, self.reference)
        return self.lookups[row].sources(self.nodes, batch.ends[row])

    def tree(self, sources: Sources) -> tuple[list[int], list[int]]:
        """The best tree of all that they say."""
        return best_tree(self.costs, sources, self.nodes)

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
            growing = {row: said for row, said in growing.items() if self.goes_on(said)}
            if not growing:
                break
        self.hidden = []  # verification begins at the embeddings

    def pays(self, sources: Sources) -> bool:
        """Whether a further token of the chain may be expected to pay."""
        return drafting_pays(self.costs, sources, self.nodes)

    def goes_on(self, sources: Sources) -> bool:
        """Whether it does after the last one's confidence."""
        return sources.confidence[-1] > self.threshold and self.pays(sources)

    def reading(
        self, logits_BK: Tensor, sampling: AnySampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """The best choices for each row's next token, and the probabilities of their ranks, which
        know nothing of temperature and noise: `[B, C, 2]`."""
        count = min(CHOICES, self.head.size)
        probs_BC = logits_BK.float().softmax(-1).topk(count).values
        ids_BC = self.head.candidates(logits_BK[:, None], positions_B1, sampling, seeds_B, count)
        return torch.stack([ids_BC[:, 0].double(), probs_BC.double()], -1)
