"""Which tokens of several sources are verified: those whose chance to be right pays their place.

Plain lists and floats, a tenth of a millisecond a round: this runs between two passes of a model.
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

SUREST = 0.98  # confidences beyond this, and beyond its opposite, say no more
RATE = 0.2  # how far a token that came true, or did not, moves a source's log-odds
NEXT, NEXT_BESIDE = 0.65, 0.45  # a chain's next token; and where a lookup says one too

Choices = list[tuple[int, float]]  # tokens, each with its chance where those before it are wrong
Places = list[tuple["Source", int]]  # of a node in the sources that have one for it


class Source(ABC):
    """It says what may follow each place of a draft. `shift` is of the log-odds of its best
    choices: where a text begins its kind's, fitted on held-out conversations of SmolLM2-135M, then
    moved by what comes true."""

    shift: float
    last_resort = False  # asked only where others say nothing
    start = 0  # its place at the root

    @abstractmethod
    def choices(self, place: int) -> Choices:
        """What may follow a place, the best first."""

    @abstractmethod
    def after(self, place: int, token: int) -> int | None:
        """The place behind a token that follows another; None where it knows of nothing there."""

    def chance(self, odds: float) -> float:
        """By the log-odds that it would have without the shift."""
        return 1 / (1 + exp(-self.shift - odds))


class Line(Source):
    """Tokens that follow one another, perhaps with further choices for each; a place is how many
    came before. `odds` are log-odds that a token is right if those before it are."""

    def __init__(self) -> None:
        self.say([])

    def say(self, tokens: Sequence[int], odds: Sequence[float] = ()) -> None:
        """These tokens, in a new round."""
        self.tokens, self.odds = list(tokens), list(odds)
        self.further: list[Choices] = [[] for _ in tokens]

    def choices(self, place: int) -> Choices:
        if place == len(self.tokens):
            return []
        return [(self.tokens[place], self.chance(self.odds[place])), *self.further[place]]

    def after(self, place: int, token: int) -> int | None:
        goes_on = place < len(self.tokens) and self.tokens[place] == token
        return place + 1 if goes_on else None


class Lookup(Line):
    """What followed where the end of the text stood before, in itself or in a store."""

    shift = -0.74

    def look_up(self, length: int, tokens: Sequence[int]) -> None:
        """A match of so many tokens, and what followed: the longer what has matched so far, the
        likelier is the next one."""
        self.say(tokens, [1.24 * log(length + depth) for depth in range(len(tokens))])


class DraftedChain(Line):
    """What a model drafts, token by token; `confidence` is the probability of the last one, 1 where
    there is none."""

    shift = 0.5  # an adapter is right more often than it is sure

    def say(self, tokens: Sequence[int], odds: Sequence[float] = ()) -> None:
        super().say(tokens, odds)
        self.confidence = 1.0

    def add(self, ranked: Sequence[tuple[int, float]]) -> None:
        """The best token after the last, and the next best ones, with their probabilities."""
        (best, self.confidence), *further = ranked
        sure = min(max(self.confidence, 1 - SUREST), SUREST)
        rest, shares = 1 - self.confidence, []
        for token, probability in further:
            shares.append((token, min(probability / max(rest, 1e-6), 1.0)))
            rest -= probability
        self.tokens.append(best)
        self.odds.append(log(sure / (1 - sure)))
        self.further.append(shares)


class Recycled(Source):
    """What was likeliest where each token last stood, by a matrix that changes elsewhere; a place
    is the token before."""

    shift = -0.6
    last_resort = True  # a lookup knows it too, and a chain better

    def __init__(self, matrix: dict[int, list[int]]):
        self.matrix = matrix

    def choices(self, place: int) -> Choices:
        return [(token, self.chance(0.0)) for token in self.matrix.get(place, ())[:1]]

    def after(self, place: int, token: int) -> int | None:
        return token


@dataclass
class Sources:
    """Of a row's text: lookups in itself and others; what is drafted, and perhaps recycled; how
    long the text was when they were last asked."""

    lookups: list[Lookup]
    chain: DraftedChain
    recycled: Recycled | None = None
    length: int = 0

    def __post_init__(self) -> None:
        self.all: list[Source] = [*self.lookups, self.chain]
        self.all += [] if self.recycled is None else [self.recycled]

    @property
    def places(self) -> Places:  # of the root
        return [(source, source.start) for source in self.all]

    @property
    def likeliest_lookup(self) -> Lookup:
        """The one whose first token is likeliest."""
        return max(self.lookups, key=lambda line: [chance for _, chance in line.choices(0)])

    def learn(self, written: Sequence[int]) -> None:
        """Shift each source by what the text has had in this place, as far as it foresaw."""
        places = self.places
        for token in written:
            for source, choices in heard(places):
                best, chance = choices[0]
                source.shift += RATE * ((best == token) - chance)
            places = after(places, token)


def heard(places: Places) -> list[tuple[Source, Choices]]:
    """The sources that say something of a node."""
    said: list[tuple[Source, Choices]] = []
    for source, place in places:
        if not (said and source.last_resort) and (choices := source.choices(place)):
            said.append((source, choices))
    return said


def after(places: Places, token: int) -> Places:
    """Those behind a token."""
    behind = [(source, source.after(place, token)) for source, place in places]
    return [(source, place) for source, place in behind if place is not None]


@dataclass(frozen=True)
class Costs:
    """What work costs, in vanilla steps: verifying 0, 1, 2, ... nodes beside the root; drafting a
    token of the chain, and the part of that which is saved where the lookup says the same token,
    whose `states` were computed together with the pending token's.

    Args:
        min_gain_per_step: tokens that work has to gain for each vanilla step that it costs.
    """

    verify: Sequence[float]
    draft: float
    min_gain_per_step: float
    states: float = 0.0

    @cached_property
    def of_any_node(self) -> float:
        """Tokens that any node has to gain at least."""
        return self.min_gain_per_step * min(b - a for a, b in pairwise(self.verify))

    def of_nodes(self, count: int) -> float:
        """Tokens that this many nodes have to gain."""
        return self.min_gain_per_step * (self.verify[count] - self.verify[0])


class Node(NamedTuple):
    """The chance that its whole path is right, its token, its parent's number, where the root is 0,
    and its places in the sources."""

    gain: float
    token: int
    parent: int
    places: Places


def best_nodes(costs: Costs, sources: Sources, most: int) -> list[Node]:
    """The root, and the nodes whose gain is highest, at most so many, the best first, as far as any
    may pay. No child's is higher than its parent's, so the first n are the best tree of n."""
    nodes, coming = [Node(1.0, -1, 0, sources.places)], list[tuple[float, int, int, int]]()
    pushed, least = 0, costs.of_any_node
    for number in range(most):
        node = nodes[number]
        for token, chance in next_tokens(heard(node.places)):
            if (gain := node.gain * chance) > least:
                pushed += 1  # of equals the earlier is first
                heappush(coming, (-gain, pushed, token, number))
        if not coming:
            break
        loss, _, token, parent = heappop(coming)
        nodes.append(Node(-loss, token, parent, after(nodes[parent].places, token)))
    return nodes


def next_tokens(said: Sequence[tuple[Source, Choices]]) -> Choices:
    """The tokens for a place, each with its chance. Of the best ones of several sources at most one
    is right; what several say is trusted for all their reasons. Further ones share what is left."""
    if len(said) == 1 == len(said[0][1]):  # as far down a lookup
        return said[0][1]
    wrong: dict[int, float] = {}
    for _, choices in said:
        token, chance = choices[0]
        wrong[token] = wrong.get(token, 1.0) * (1 - chance)
    all_wrong = prod(wrong.values())
    chances = {token: (1 - chance) * all_wrong / chance for token, chance in wrong.items()}
    left = max(1 - sum(chances.values()), 0.0)
    for _, choices in said:
        for token, share in choices[1:]:
            if token not in chances:
                chances[token] = left * share
                left -= left * share
    return list(chances.items())


def drafting_pays(costs: Costs, sources: Sources, most: int) -> bool:
    """Whether a further token of the chain may be expected to make the tree, of `most` nodes at
    most, worth more than it costs to draft."""
    nodes, place = best_nodes(costs, sources, most), (sources.chain, len(sources.chain.tokens))
    if (end := next((node for node in nodes if place in node.places), None)) is None:
        return False
    said, adds, cost = heard(end.places), NEXT, costs.draft
    foreseen = max((choices[0][1] for _, choices in said), default=0.0)
    if any(source in sources.lookups for source, _ in said):
        adds = NEXT_BESIDE
        cost -= costs.states * foreseen  # where the lookup is right the chain most often agrees
    gains = [node.gain for node in nodes[1:]]
    _, before = best_size(costs, gains)
    gains.append(end.gain * adds * (1 - foreseen))
    _, after = best_size(costs, sorted(gains, reverse=True)[:most])
    return after - before > costs.min_gain_per_step * cost


def best_tree(costs: Costs, sources: Sources, most: int) -> Nodes:
    """The tree of `most` nodes at most that gains most for its cost."""
    nodes = best_nodes(costs, sources, most)[1:]
    count, _ = best_size(costs, [node.gain for node in nodes])
    return [node.token for node in nodes[:count]], [node.parent for node in nodes[:count]]


def best_size(costs: Costs, gains: Sequence[float]) -> tuple[int, float]:
    """How many nodes gain most beyond what they cost, and how much; the largest gains are first."""
    sums = accumulate(gains, initial=0.0)
    worth = [gain - costs.of_nodes(size) for size, gain in enumerate(sums)]
    best = max(worth)
    return worth.index(best), best
