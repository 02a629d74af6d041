"""Decode again from a trace: the rounds that a drafter would have had, without any model.

Greedy decoding writes the target's own text whatever is drafted. So a round is known from the place
where it begins: what is drafted there, and how far the text says the same.

Shapes: P positions where a round can begin, S draft steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kangaroo.drafters.base import FromText
from kangaroo.drafters.datastore import Datastore
from kangaroo.drafters.expected_gain import Costs, Sources, best_tree, drafting_pays
from kangaroo.drafters.hybrid import Lookup
from kangaroo.drafters.odds import Odds
from kangaroo.drafters.suffix import shared
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget, free
from kangaroo.engine.cache import KVCache
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.tune.trace import Drafted, Grown, Turn
from kangaroo.utils.errors import ConfigError


@dataclass
class Replay:
    """The rounds of a turn, the prefill's first, as `evaluation.records.MethodRun` has them.

    Args:
        emitted, accepted, drafted: tokens of each round.
        chain: tokens that the adapter drafted in each, verified or not.
        begins: after how many new tokens each round begins.
    """

    emitted: list[int] = field(default_factory=lambda: [1])
    accepted: list[int] = field(default_factory=lambda: [0])
    drafted: list[int] = field(default_factory=lambda: [0])
    chain: list[int] = field(default_factory=lambda: [0])
    begins: list[int] = field(default_factory=lambda: [0])

    def add(self, begins: int, right: int, left: int, drafted: int, chain: int) -> None:
        """A round.

        Args:
            right: how many drafted tokens the text follows.
            left: how many tokens the text has from there on.
        """
        self.emitted.append(min(right + 1, left))
        self.accepted.append(right)
        self.drafted.append(drafted)
        self.chain.append(chain)
        self.begins.append(begins)


@dataclass(frozen=True)
class Chains:
    """What would be drafted from each position of a turn, as far as rounds depend on it.

    Args:
        counts_P: drafted tokens.
        right_P: how many of them the text follows.
        by_adapter_P: how many of them an adapter drafted.
    """

    counts_P: np.ndarray
    right_P: np.ndarray
    by_adapter_P: np.ndarray

    def where_none(self, other: Chains) -> Chains:
        """The other's draft where this one is empty: a cascade's."""
        found_P = self.counts_P > 0
        pairs = (
            (self.counts_P, other.counts_P),
            (self.right_P, other.right_P),
            (self.by_adapter_P, other.by_adapter_P),
        )
        return Chains(*(np.where(found_P, mine_P, their_P) for mine_P, their_P in pairs))

    def replay(self, turn: Turn) -> Replay:
        """The rounds: a draft begins where the last round ended."""
        counts, right, by_adapter = (
            part_P.tolist() for part_P in (self.counts_P, self.right_P, self.by_adapter_P)
        )
        replay, size, at = Replay(), len(turn.text), 1
        while at < size:
            replay.add(at, right[at - 1], size - at, counts[at - 1], by_adapter[at - 1])
            at += right[at - 1] + 1
        return replay


def nothing(turn: Turn) -> Replay:
    """Vanilla decoding: a token a round."""
    none_P = np.zeros(len(turn.text) - 1, int)
    return Chains(none_P, none_P, none_P).replay(turn)


def chains(turn: Turn, drafted: Drafted, threshold: float, steps: int) -> Chains:
    """What Kangaroo drafts: exactly as `drafter=kangaroo` with these settings.

    Errors: `ConfigError` where the trace has no chain of so many steps.
    """
    check_steps(drafted, steps)
    # compared as decoding does: a probability in float32, and the threshold as well
    unsure_PS = drafted.chances_PS[:, :steps] <= np.float32(threshold)
    unsure_PS[:, -1:] = True
    counts_P = unsure_PS.argmax(1) + 1
    right_P = np.minimum(counts_P, followed(turn, drafted).sum(1))
    return Chains(counts_P, right_P, counts_P)


def chain(turn: Turn, drafted: Drafted, threshold: float, steps: int) -> Replay:
    """The rounds of Kangaroo; see `chains`."""
    return chains(turn, drafted, threshold, steps).replay(turn)


def text_chains(turn: Turn, drafter: FromText, ends: Collection[int]) -> Chains:
    """What a drafter that reads the text alone drafts: exactly its own.

    Args:
        ends: the tokens that end a text.
    """
    batch = text_batch(turn, ends)
    drafter.begin(batch)
    counts, right = [], []
    for at in range(1, len(turn.text)):
        found = drafter.continuation(0, batch.texts[0])
        counts.append(len(found))
        right.append(shared(found, turn.text[at:]))
        batch.append(0, turn.text[at : at + 1])
    counts_P, right_P = np.array(counts, int), np.array(right, int)
    return Chains(counts_P, right_P, np.zeros_like(counts_P))


def followed(turn: Turn, drafted: Drafted) -> np.ndarray:
    """`[P, S]`: whether the text is the chain up to this step."""
    tokens_PS = drafted.tokens_PS
    same_PS = tokens_PS == coming(turn, drafted.steps)[: len(tokens_PS)]
    return np.logical_and.accumulate(same_PS, axis=1)


def coming(turn: Turn, steps: int) -> np.ndarray:
    """`[P + 1, S]`: the text after each position; -1 beyond its end."""
    padded = np.full(len(turn.text) + steps, -1)
    padded[: len(turn.text)] = turn.text
    return np.lib.stride_tricks.sliding_window_view(padded[1:], steps)


def check_steps(known: Drafted | Grown, steps: int) -> None:
    """Raise `ConfigError` where a trace does not reach so far."""
    if not 1 <= steps <= known.steps:
        raise ConfigError(
            f"steps={steps} cannot be replayed: the trace has drafts of {known.steps}. Choose 1 to "
            "that many, or trace again with more."
        )


@dataclass(frozen=True)
class HybridSettings:
    """What fixes the trees of `drafter=hybrid`; see `kangaroo.drafters.hybrid.HybridConfig`."""

    odds: Odds
    costs: Costs
    threshold: float
    steps: int
    nodes: int
    reference: Datastore | None = None


def hybrid(turn: Turn, drafted: Drafted, settings: HybridSettings, ends: Collection[int]) -> Replay:
    """The rounds of `drafter=hybrid`: exactly its own, where it decodes with these costs.

    Errors: `ConfigError` where the trace has no chain of so many steps.
    """
    check_steps(drafted, settings.steps)
    replay, text = Replay(), [*turn.prompt, *turn.text[:1]]
    lookup = Lookup(text, settings.reference)
    while (at := len(text) - len(turn.prompt)) < len(turn.text):
        length, found = lookup.find(settings.nodes)
        end = next((i for i, token in enumerate(found, 1) if token in ends), None)
        sources = Sources(length, found[:end])
        draft_chain(sources, drafted, at - 1, settings)
        tokens, parents = best_tree(settings.odds, settings.costs, sources, settings.nodes)
        right = walked(tokens, parents, turn.text[at:])
        replay.add(at, right, len(turn.text) - at, len(tokens), len(sources.chain))
        text += turn.text[at : at + right + 1]
    return replay


def draft_chain(
    sources: Sources, drafted: Drafted, position: int, settings: HybridSettings
) -> None:
    """Add a chain to the sources, as long as the hybrid drafts on."""
    odds, costs, most = settings.odds, settings.costs, settings.nodes
    while len(sources.chain) < settings.steps and drafting_pays(odds, costs, sources, most):
        step = len(sources.chain)
        sources.chain.append(int(drafted.tokens_PS[position, step]))
        sources.confidence.append(float(drafted.chances_PS[position, step]))
        choices = drafted.further_PSC[position, step], drafted.further_chances_PSC[position, step]
        sources.further.append(list(zip(*(part.tolist() for part in choices), strict=True)))
        if drafted.chances_PS[position, step] <= np.float32(settings.threshold):
            break


def walked(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> int:
    """How far a text follows a tree.

    Args:
        parents: 0 is the root, i the i-th node.
    """
    children = {
        (parent, token): i for i, (parent, token) in enumerate(zip(parents, tokens, strict=True), 1)
    }
    node, depth = 0, 0
    while depth < len(text) and (node, text[depth]) in children:
        node = children[node, text[depth]]
        depth += 1
    return depth


def text_batch(turn: Turn, ends: Collection[int]) -> Batch:
    """A row as decoding has it after the prefill, with no model behind it."""
    longest, cpu = len(turn.prompt) + len(turn.text), torch.device("cpu")
    cache = KVCache(1, longest + 1, 1, 1, torch.float32, devices=[])
    batch = Batch(cache, longest, Sampling(), frozenset(ends), cpu, Budget(free))
    batch.place(0, torch.tensor(turn.prompt), Request(turn.prompt, len(turn.text)))
    batch.append(0, turn.text[:1])
    return batch
