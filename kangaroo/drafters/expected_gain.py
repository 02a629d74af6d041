"""Builds the hybrid's tree: of the candidates of several sources those that pay for verification.

Plain lists and floats: this runs between two passes of a model and takes 0.1 ms a round.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import exp, log, prod
from typing import NamedTuple

from kangaroo.engine.tree import Nodes

MAX_CONFIDENCE = 0.98  # confidences are clamped to [1 - MAX_CONFIDENCE, MAX_CONFIDENCE]
LEARNING_RATE = 0.2  # of a source's log-odds, from each token that it predicted
# Chance that the chain's next token is right; and where a lookup has a candidate, too.
NEXT_CHANCE, NEXT_CHANCE_BESIDE_LOOKUP = 0.65, 0.45

Candidates = list[tuple[int, float]]  # tokens, each with its chance if those before it are wrong
Places = list[tuple["Source", int]]  # where a node stands in each source that contains it


class Source(ABC):
    """Predicts the tokens that may follow each place of a draft. `shift` corrects the log-odds of
    its best candidates: it starts from a value fitted on held-out conversations of SmolLM2-135M,
    and learns from the text."""

    shift: float
    is_last_resort = False  # whether it counts only where no other source has candidates
    start = 0  # its place at the root

    @abstractmethod
    def candidates(self, place: int) -> Candidates:
        """The tokens that may follow a place, the best first."""

    @abstractmethod
    def next_place(self, place: int, token: int) -> int | None:
        """The place after `token`; None where the source has no such token there."""

    def chance(self, log_odds: float) -> float:
        """The probability of log-odds that are corrected by the shift."""
        return 1 / (1 + exp(-self.shift - log_odds))


class Line(Source):
    """A line of tokens, each perhaps with alternatives; a place is the number of tokens before it.
    `log_odds` are those of a token to be right if all tokens before it are."""

    def __init__(self) -> None:
        self.replace([])

    def replace(self, tokens: Sequence[int], log_odds: Sequence[float] = ()) -> None:
        """Predict this line from now on."""
        self.tokens, self.log_odds = list(tokens), list(log_odds)
        self.alternatives: list[Candidates] = [[] for _ in tokens]

    def candidates(self, place: int) -> Candidates:
        if place == len(self.tokens):
            return []
        best = self.tokens[place], self.chance(self.log_odds[place])
        return [best, *self.alternatives[place]]

    def next_place(self, place: int, token: int) -> int | None:
        is_next = place < len(self.tokens) and self.tokens[place] == token
        return place + 1 if is_next else None


class Lookup(Line):
    """The tokens that followed an earlier occurrence of the text's end, here or in a store."""

    shift = -0.74

    def match(self, length: int, tokens: Sequence[int]) -> None:
        """Predict `tokens` after a match of `length`; longer matches are right more often."""
        self.replace(tokens, [1.24 * log(length + depth) for depth in range(len(tokens))])


class DraftedChain(Line):
    """The chain that a model drafts; `confidence` is that of its last token, 1 if it has none."""

    shift = 0.5  # adapters are right more often than their confidence says

    def replace(self, tokens: Sequence[int], log_odds: Sequence[float] = ()) -> None:
        super().replace(tokens, log_odds)
        self.confidence = 1.0

    def append(self, ranked: Sequence[tuple[int, float]]) -> None:
        """Add the next token, given as candidates with their probabilities, the best first."""
        (best, self.confidence), *others = ranked
        clamped = min(max(self.confidence, 1 - MAX_CONFIDENCE), MAX_CONFIDENCE)
        rest, alternatives = 1 - self.confidence, []
        for token, probability in others:
            alternatives.append((token, min(probability / max(rest, 1e-6), 1.0)))
            rest -= probability
        self.tokens.append(best)
        self.log_odds.append(log(clamped / (1 - clamped)))
        self.alternatives.append(alternatives)


class Recycled(Source):
    """The likeliest successor of each token at its last occurrence, from a matrix that its owner
    updates; a place is the token before."""

    shift = -0.6
    is_last_resort = True  # lookups contain the same tokens, and chains are better

    def __init__(self, matrix: dict[int, list[int]]):
        self.matrix = matrix

    def candidates(self, place: int) -> Candidates:
        return [(token, self.chance(0.0)) for token in self.matrix.get(place, ())[:1]]

    def next_place(self, place: int, token: int) -> int | None:
        return token


@dataclass
class Sources:
    """The sources of one row's text, and the text's length when they last predicted."""

    lookups: list[Lookup]
    chain: DraftedChain
    recycled: Recycled | None = None
    length: int = 0

    def __post_init__(self) -> None:
        self.all: list[Source] = [*self.lookups, self.chain]
        self.all += [] if self.recycled is None else [self.recycled]

    @property
    def root(self) -> Places:
        """Where the pending token stands in each source."""
        return [(source, source.start) for source in self.all]

    @property
    def likeliest_lookup(self) -> Lookup:
        """The lookup whose first token is likeliest."""
        return max(self.lookups, key=lambda line: [chance for _, chance in line.candidates(0)])

    def learn(self, written: Sequence[int]) -> None:
        """Move every source's shift by whether its best candidates were what the text had next."""
        places = self.root
        for token in written:
            for source, ((best, chance), *_) in predictions(places):
                source.shift += LEARNING_RATE * ((best == token) - chance)
            places = next_places(places, token)


def predictions(places: Places) -> list[tuple[Source, Candidates]]:
    """The sources that have candidates after a node, with these."""
    predicted: list[tuple[Source, Candidates]] = []
    for source, place in places:
        if not (predicted and source.is_last_resort) and (candidates := source.candidates(place)):
            predicted.append((source, candidates))
    return predicted


def next_places(places: Places, token: int) -> Places:
    """The places of the node `token` below the node at `places`."""
    below = [(source, source.next_place(place, token)) for source, place in places]
    return [(source, place) for source, place in below if place is not None]


@dataclass(frozen=True)
class Costs:
    """Costs in vanilla steps.

    Args:
        verify: of verifying the root and 0, 1, 2, ... nodes.
        draft: of drafting a token of the chain.
        min_gain_per_step: tokens that must be gained for the cost of each vanilla step.
        states: the part of `draft` that is saved where the lookup predicts the same token, whose
            states are computed together with the pending token's.
    """

    verify: Sequence[float]
    draft: float
    min_gain_per_step: float
    states: float = 0.0

    @cached_property
    def min_node_gain(self) -> float:
        """The tokens that any node must gain at least."""
        return self.min_gain_per_step * min(b - a for a, b in pairwise(self.verify))

    def min_gain(self, count: int) -> float:
        """The tokens that `count` nodes must gain together."""
        return self.min_gain_per_step * (self.verify[count] - self.verify[0])


class Node(NamedTuple):
    """The chance that its whole path is right, its token, its parent's number (0 is the root), and
    its places in the sources."""

    gain: float
    token: int
    parent: int
    places: Places


def best_nodes(costs: Costs, sources: Sources, most: int) -> list[Node]:
    """The root and up to `most` nodes, by descending gain, as far as a node may pay. A child's gain
    is at most its parent's, so the first n nodes are the best tree of n."""
    nodes, open_nodes = [Node(1.0, -1, 0, sources.root)], list[tuple[float, int, int, int]]()
    pushed, least = 0, costs.min_node_gain
    for number in range(most):
        node = nodes[number]
        for token, chance in merged(predictions(node.places)):
            if (gain := node.gain * chance) > least:
                pushed += 1  # breaks ties: the earlier node comes first
                heappush(open_nodes, (-gain, pushed, token, number))
        if not open_nodes:
            break
        loss, _, token, parent = heappop(open_nodes)
        nodes.append(Node(-loss, token, parent, next_places(nodes[parent].places, token)))
    return nodes


def merged(predicted: Sequence[tuple[Source, Candidates]]) -> Candidates:
    """One list of candidates for a place. At most one of the sources' best candidates is right; one
    that several sources predict gets the chance that not all of them are wrong. The alternatives
    share what is left."""
    if len(predicted) == 1 == len(predicted[0][1]):  # most often: deep in a lookup
        return predicted[0][1]
    wrong: dict[int, float] = {}
    for _, ((token, chance), *_) in predicted:
        wrong[token] = wrong.get(token, 1.0) * (1 - chance)
    all_wrong = prod(wrong.values())
    chances = {token: (1 - chance) * all_wrong / chance for token, chance in wrong.items()}
    rest = max(1 - sum(chances.values()), 0.0)
    for _, (_, *alternatives) in predicted:
        for token, share in alternatives:
            if token not in chances:
                chances[token] = rest * share
                rest -= rest * share
    return list(chances.items())


def drafting_pays(costs: Costs, sources: Sources, most: int) -> bool:
    """Whether one more token of the chain is expected to raise the value of the best tree, of at
    most `most` nodes, by more than drafting it costs."""
    nodes, place = best_nodes(costs, sources, most), (sources.chain, len(sources.chain.tokens))
    if (end := next((node for node in nodes if place in node.places), None)) is None:
        return False
    predicted, next_chance, cost = predictions(end.places), NEXT_CHANCE, costs.draft
    foreseen = max((candidates[0][1] for _, candidates in predicted), default=0.0)
    if any(source in sources.lookups for source, _ in predicted):
        next_chance = NEXT_CHANCE_BESIDE_LOOKUP
        cost -= costs.states * foreseen  # where the lookup is right the chain most often agrees
    gains = [node.gain for node in nodes[1:]]
    _, value = best_size(costs, gains)
    gains.append(end.gain * next_chance * (1 - foreseen))
    _, new_value = best_size(costs, sorted(gains, reverse=True)[:most])
    return new_value - value > costs.min_gain_per_step * cost


def best_tree(costs: Costs, sources: Sources, most: int) -> Nodes:
    """The tree of at most `most` nodes with the highest gain less cost."""
    nodes = best_nodes(costs, sources, most)[1:]
    count, _ = best_size(costs, [node.gain for node in nodes])
    return [node.token for node in nodes[:count]], [node.parent for node in nodes[:count]]


def best_size(costs: Costs, gains: Sequence[float]) -> tuple[int, float]:
    """The number of nodes with the highest gain less cost, and that value; `gains` descend."""
    sums = accumulate(gains, initial=0.0)
    values = [gain - costs.min_gain(size) for size, gain in enumerate(sums)]
    best = max(values)
    return values.index(best), best
