"""Hybrid: one tree from what the text itself says and what Kangaroo drafts.

Shapes: B rows, C choices for a token, K draft vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor

from kangaroo.drafters import acceptance, datastore
from kangaroo.drafters.acceptance import CHOICES, AcceptanceTable
from kangaroo.drafters.chain import chain_meta
from kangaroo.drafters.datastore import Datastore
from kangaroo.drafters.early_exit import EarlyExitConfig
from kangaroo.drafters.expected_gain import Costs, Sources, best_tree, drafting_pays
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.suffix import SuffixAutomaton
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget
from kangaroo.engine.sampling import AnySampling
from kangaroo.engine.tree import Draft
from kangaroo.heads import adapter_files
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.loading import options_of
from kangaroo.models.target import TargetModel
from kangaroo.utils.folders import command_line
from kangaroo.utils.ranges import DraftSize, Length, NotNegative, Positive, Threshold

REFERENCE_SPAN = 16  # tokens at the end of a text that a reference is searched for

log = logging.getLogger(__name__)


@cache  # once, however many drafters are made with it
def say_assumed(adapter: str) -> None:
    """That nothing was counted for this adapter."""
    log.warning(
        "'%s' has no %s, so its trees are chosen by assumed numbers. Count them: %s",
        *(adapter, acceptance.FILE, count_again(adapter)),
    )


def count_again(adapter: str) -> str:
    """The command that counts what an adapter is right at."""
    target = options_of(adapter_files.read_config(adapter).target)
    return command_line("prepare calibrate", **target, drafter__adapter=adapter)


@dataclass
class HybridConfig(EarlyExitConfig):
    """One tree from a lookup and from Kangaroo's chain, its nodes chosen by expected gain.

    Args:
        threshold: as of Kangaroo; 0 leaves it to the expected gain where the chain stops.
        nodes: of the tree that is verified, the pending token aside: at most this many.
        verify_costs: of verifying 1, 2, 4, 8, ... tokens, in vanilla steps; between two of them,
            and beyond the last two, a straight line. Null is measured, once for each device and
            number of threads.
        draft_cost: of a token of the chain, in vanilla steps; read where `verify_costs` is.
        min_gain_per_step: tokens that decoding writes in the time of a vanilla step: what further
            work in a round has to be worth.
        reference: folder of a datastore (`scripts/prepare.py datastore`) that is searched for
            longer matches than the text has itself; null searches the text alone.
    """

    name: str = "hybrid"
    threshold: Threshold = 0.0
    nodes: DraftSize = 15
    verify_costs: Annotated[list[Positive], Length(2)] | None = None
    draft_cost: NotNegative = 0.05
    min_gain_per_step: Positive = 1.5
    reference: str | None = None

    def of(self, lm: TargetModel, trained: Any, heads: list[DraftHead]) -> Hybrid:
        """Errors: `ConfigError`, and those of `acceptance.read` and `datastore.load`."""
        reference = None if self.reference is None else datastore.load(self.reference, lm)
        costs = None
        if self.verify_costs is not None:
            costs = Costs(
                verify_curve(self.verify_costs, self.nodes), self.draft_cost, self.min_gain_per_step
            )
        return Hybrid(
            lm,
            trained,
            self.steps,
            self.threshold,
            heads[0],
            acceptance=self._counted_or_assumed(),
            costs=costs,
            min_gain_per_step=self.min_gain_per_step,
            nodes=self.nodes,
            reference=reference,
        )

    def counted(self) -> AcceptanceTable | None:
        """The odds that were counted for the adapter; None where none were."""
        if self._untrained() is not None:
            return None
        folder = adapter_files.find(self.adapter, (acceptance.FILE,))
        weights = adapter_files.weights_hash(self.adapter)
        return acceptance.read(folder, weights, count_again(self.adapter))

    def _counted_or_assumed(self) -> AcceptanceTable:
        if (counted := self.counted()) is not None:
            return counted
        if self._untrained() is None:
            say_assumed(self.adapter)
        return acceptance.assumed()

    def settings(self) -> dict[str, Any]:
        counted = self.counted()
        settings = super().settings() | {"odds": counted and acceptance.fingerprint(counted)}
        if self.reference is not None:
            settings["fingerprint"] = datastore.fingerprint(self.reference)
        return settings


def verify_curve(costs: Sequence[float], nodes: int) -> list[float]:
    """Of verifying 0 to `nodes` nodes beside the root, by straight lines between known widths.

    Args:
        costs: of 1, 2, 4, 8, ... tokens, two of them or more.
    """
    points = [(2**i, cost) for i, cost in enumerate(costs)]
    curve = []
    for width in range(1, nodes + 2):
        parts = [part for part in pairwise(points) if part[0][0] <= width]
        (low, below), (high, above) = parts[-1]
        curve.append(below + (above - below) * (width - low) / (high - low))
    return curve


class Lookup:
    """What followed the end of a growing text where it stood before.

    Args:
        text: grows elsewhere.
        reference: searched for longer matches.
    """

    def __init__(self, text: list[int], reference: Datastore | None = None):
        self.text, self.reference = text, reference
        self.automaton = SuffixAutomaton(text)

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
        costs: of at least `nodes` nodes; None is measured, as `HybridConfig.verify_costs` says.
        min_gain_per_step: as of `HybridConfig`, for costs that are measured.
        nodes: at most this many, the root aside.
    """

    reads_logits = True  # for the next best choices

    def __init__(
        self,
        lm: TargetModel,
        adapter: Layer,
        steps: int = 6,
        threshold: float = 0.0,
        head: DraftHead | None = None,
        *,
        acceptance: AcceptanceTable,
        costs: Costs | None = None,
        min_gain_per_step: float = 1.5,
        nodes: int = 15,
        reference: Datastore | None = None,
    ):
        super().__init__(lm, adapter, steps, threshold, head)
        self.acceptance, self.nodes, self.reference, self.min_gain_per_step = (
            acceptance,
            nodes,
            reference,
            min_gain_per_step,
        )
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
        length, tokens = self.lookups[row].find(self.nodes)
        end = next((i for i, token in enumerate(tokens, 1) if token in batch.ends[row]), None)
        return Sources(length, tokens[:end])

    def tree(self, sources: Sources) -> tuple[list[int], list[int]]:
        """The best tree of all that they say."""
        return best_tree(self.acceptance, self.costs, sources, self.nodes)

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
        return drafting_pays(self.acceptance, self.costs, sources, self.nodes)

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
