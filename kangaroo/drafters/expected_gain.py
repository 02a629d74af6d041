"""Chooses which tokens of several sources to verify: those that are likely enough for their cost.

It runs between two passes of a model, so it uses plain lists and floats: 0.1 ms a round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import exp, log, prod
from operator import itemgetter
from typing import NamedTuple

from kangaroo.engine.tree import Nodes

MAX_CONFIDENCE = 0.98  # confidences above this, or below 1 minus this, tell nothing more
RATE = 0.2  # how much a right or wrong token moves a source's log-odds
NEXT_CHANCE = 0.65  # that a chain's next token is right
NEXT_CHANCE_WITH_LOOKUP = 0.45  # the same where a lookup predicts a token, too

# Tokens, the best first. Each has the chance that it is right if those before it are wrong.
Choices = list[tuple[int, float]]
Places = list[tuple["TokenSource", int]]  # where a node is in each source that continues after it


class TokenSource:
    """A chain of tokens, perhaps with alternatives, of which each has log-odds that it is right if
    the tokens before it are. A place is the number of tokens before it. `shift` is added to all
    log-odds. A text begins with the class's value, which was fitted on held-out conversations of
    SmolLM2-135M; right and wrong predictions then move it."""

    shift: float

    def __init__(self) -> None:
        self.set_tokens([])

    def set_tokens(self, tokens: Sequence[int], log_odds: Sequence[float] = ()) -> None:
        """Replace the chain for a new round."""
        self.tokens = list(tokens)
        self.log_odds = list(log_odds)
        self.alternatives: list[Choices] = [[] for _ in tokens]

    def choices(self, place: int) -> Choices:
        """The candidates after a place, the best first."""
        if place == len(self.tokens):
            return []
        chance = 1 / (1 + exp(-self.shift - self.log_odds[place]))
        return [(self.tokens[place], chance), *self.alternatives[place]]


class Lookup(TokenSource):
    """The tokens that followed where the end of the text occurred before."""

    shift = -0.74

    def set_match(self, length: int, tokens: Sequence[int]) -> None:
        """Set the tokens after a match of `length` tokens; a longer match makes them likelier."""
        self.set_tokens(tokens, [1.24 * log(length + depth) for depth in range(len(tokens))])


class DraftedChain(TokenSource):
    """The chain that a model drafts; `confidence` is the last token's probability, at first 1."""

    shift = 0.5  # an adapter is right more often than its confidence says

    def set_tokens(self, tokens: Sequence[int], log_odds: Sequence[float] = ()) -> None:
        super().set_tokens(tokens, log_odds)
        self.confidence = 1.0

    def add(self, ranked: Sequence[tuple[int, float]]) -> None:
        """Append the first of these tokens with probabilities; the others are alternatives."""
        (best, self.confidence), *others = ranked
        clipped = min(max(self.confidence, 1 - MAX_CONFIDENCE), MAX_CONFIDENCE)
        rest = 1 - self.confidence
        alternatives = []
        for token, probability in others:
            alternatives.append((token, min(probability / max(rest, 1e-6), 1.0)))
            rest -= probability
        self.tokens.append(best)
        self.log_odds.append(log(clipped / (1 - clipped)))
        self.alternatives.append(alternatives)


@dataclass
class Sources:
    """The sources for a row's text; `length` is the text's length when they were last updated."""

    lookup: Lookup
    chain: DraftedChain
    length: int = 0

    def __post_init__(self) -> None:
        self.all: list[TokenSource] = [self.lookup, self.chain]

    @property
    def places(self) -> Places:
        """The place of the root in each source."""
        return [(source, 0) for source in self.all]

    def learn(self, tokens: Sequence[int]) -> None:
        """Shift each source, by whether it predicted the tokens that were written instead."""
        places = self.places
        for token in tokens:
            for source, choices in predictions_at(places):
                best, chance = choices[0]
                source.shift += RATE * ((best == token) - chance)
            places = places_after(places, token)


def predictions_at(places: Places) -> list[tuple[TokenSource, Choices]]:
    """The sources that have candidates for a node, each with these."""
    predictions = [(source, source.choices(place)) for source, place in places]
    return [(source, choices) for source, choices in predictions if choices]


def places_after(places: Places, token: int) -> Places:
    """The sources' places after `token`, of those that continue with it."""
    return [(source, at + 1) for source, at in places if source.tokens[at : at + 1] == [token]]


@dataclass(frozen=True)
class Costs:
    """The costs of a round, in vanilla steps.

    Args:
        verify: costs of verifying 0, 1, 2, ... nodes beside the root.
        draft: cost of drafting a token of the chain.
        min_gain_per_step: tokens that work has to gain for each vanilla step that it takes.
        states: the part of `draft` that is saved if a lookup predicts the same token, since its
            states were computed with those of the pending token.
    """

    verify: Sequence[float]
    draft: float
    min_gain_per_step: float
    states: float = 0.0

    @property
    def min_chance(self) -> float:
        """How likely a node has to be right to pay where nodes are cheapest."""
        return self.min_gain_per_step * min(b - a for a, b in pairwise(self.verify))

    def min_gain(self, count: int) -> float:
        """Tokens that this number of nodes has to gain."""
        return self.min_gain_per_step * (self.verify[count] - self.verify[0])


class Node(NamedTuple):
    """A node of a tree; `gain` is the chance that its whole path is right, and `parent` the number
    of its parent (the root is 0)."""

    gain: float
    token: int
    parent: int
    places: Places


def best_nodes(costs: Costs, sources: Sources, max_nodes: int) -> list[Node]:
    """The root and the nodes with the highest gain, the best first, as long as one may pay. No gain
    exceeds the parent's, so the first n nodes are the best tree of n nodes."""
    nodes = [Node(1.0, -1, 0, sources.places)]
    least = costs.min_chance
    candidates = list[tuple[float, int, int, int]]()
    for number in range(max_nodes):
        node = nodes[number]
        for token, chance in next_tokens(predictions_at(node.places)):
            gain = node.gain * chance
            if gain > least:
                # of equal gains the earlier candidate comes first
                heappush(candidates, (-gain, len(nodes) + len(candidates), token, number))
        if not candidates:
            break
        loss, _, token, parent = heappop(candidates)
        nodes.append(Node(-loss, token, parent, places_after(nodes[parent].places, token)))
    return nodes


def next_tokens(predictions: Sequence[tuple[TokenSource, Choices]]) -> Choices:
    """The tokens for a place, each with its chance. At most one of the sources' best choices is
    right, a token of several sources is likelier, and alternatives share the remaining chance."""
    if len(predictions) == 1 == len(predictions[0][1]):  # a shortcut
        return predictions[0][1]
    wrong: dict[int, float] = {}
    for _, choices in predictions:
        token, chance = choices[0]
        wrong[token] = wrong.get(token, 1.0) * (1 - chance)
    all_wrong = prod(wrong.values())
    chances = {token: (1 - chance) * all_wrong / chance for token, chance in wrong.items()}
    left = max(1 - sum(chances.values()), 0.0)
    for _, choices in predictions:
        for token, share in choices[1:]:
            if token not in chances:
                chances[token] = left * share
                left -= left * share
    return list(chances.items())


def drafting_pays(costs: Costs, sources: Sources, max_nodes: int) -> bool:
    """Whether another token of the chain is expected to add more to the best tree than it costs."""
    nodes = best_nodes(costs, sources, max_nodes)
    place = (sources.chain, len(sources.chain.tokens))
    end = next((node for node in nodes if place in node.places), None)
    if end is None:
        return False
    predictions = predictions_at(end.places)
    chance = NEXT_CHANCE
    cost = costs.draft
    predicted = max((choices[0][1] for _, choices in predictions), default=0.0)
    if any(source is sources.lookup for source, _ in predictions):
        chance = NEXT_CHANCE_WITH_LOOKUP
        cost -= costs.states * predicted  # a chain mostly agrees with a lookup that is right
    gains = [node.gain for node in nodes[1:]]
    _, before = best_size(costs, gains)
    gains.append(end.gain * chance * (1 - predicted))
    _, after = best_size(costs, sorted(gains, reverse=True)[:max_nodes])
    return after - before > costs.min_gain_per_step * cost


def best_tree(costs: Costs, sources: Sources, max_nodes: int) -> Nodes:
    """The tree of at most `max_nodes` nodes whose gain minus its cost is largest."""
    nodes = best_nodes(costs, sources, max_nodes)[1:]
    count, _ = best_size(costs, [node.gain for node in nodes])
    return [node.token for node in nodes[:count]], [node.parent for node in nodes[:count]]


def best_size(costs: Costs, gains: Sequence[float]) -> tuple[int, float]:
    """The number of nodes with the largest gain minus cost, and this; `gains` are descending."""
    sums = accumulate(gains, initial=0.0)
    worth = [gain - costs.min_gain(size) for size, gain in enumerate(sums)]
    return max(enumerate(worth), key=itemgetter(1))
