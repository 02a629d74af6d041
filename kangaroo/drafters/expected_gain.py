"""Which tokens of two sources are verified: those whose chance to be right pays for their place.

Plain lists and floats, tens of microseconds a round: this runs between two passes of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

# Of the log-odds of each source where a text begins, fitted on 256 held-out conversations of
# SmolLM2-135M. An adapter is right more often than it is sure.
START = {"lookup": -0.74, "chain": 0.5}
SUREST = 0.98  # confidences beyond this, and beyond its opposite, say no more
RATE = 0.2  # how far a token that came true, or did not, moves a source's log-odds
NEXT, NEXT_BESIDE = 0.65, 0.45  # a chain's next token: alone, and where a lookup says one too


class Chances:
    """How often the tokens of a lookup and of a drafted chain are right, where all before them are:
    assumed, then learnt as a text grows. Each source is taken to know nothing of the other."""

    def __init__(self) -> None:
        self.shifts = START.copy()  # of log-odds, moved by what came true in this text

    def lookup(self, length: int) -> float:
        """That what followed a match of so many tokens follows again. The match length of a
        lookup's further tokens counts those before them: what has matched so far."""
        return 1 / (1 + exp(-1.24 * log(length) - self.shifts["lookup"]))

    def chain(self, confidence: float) -> float:
        """That a choice of the chain with this probability is right."""
        sure = min(max(confidence, 1 - SUREST), SUREST)
        return 1 / (1 + (1 - sure) / sure * exp(-self.shifts["chain"]))

    def learn(self, source: str, expected: float, right: bool) -> None:
        """A token of a source has turned out to be right, or wrong."""
        self.shifts[source] += RATE * (right - expected)


@dataclass(frozen=True)
class Costs:
    """What work costs, in vanilla steps.

    Args:
        verify: of verifying 0, 1, 2, ... nodes beside the root.
        draft: of a token of the chain.
        min_gain_per_step: tokens that a node, or a drafted token, has to gain for each vanilla step
            that it costs.
        states: the part of `draft` that is saved where the lookup says the same token, whose states
            were computed together with the pending token's.
    """

    verify: Sequence[float]
    draft: float
    min_gain_per_step: float
    states: float = 0.0

    def of_nodes(self, count: int) -> float:
        """Tokens that this many nodes have to gain."""
        return self.min_gain_per_step * (self.verify[count] - self.verify[0])


@dataclass
class Sources:
    """What a round has to choose from.

    Args:
        length: tokens at the end of the text that the lookup found elsewhere; 0 is no match.
        lookup: what followed there.
        chain: what was drafted, with the top-1 probability at each token, and `further` choices
            for it, the next best, and their probabilities.
    """

    chances: Chances
    length: int
    lookup: list[int]
    chain: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    further: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def shared(self) -> int:
        """How many tokens both say from the first on."""
        pairs = enumerate(zip(self.lookup, self.chain, strict=False))
        length = min(len(self.lookup), len(self.chain))
        return next((i for i, (a, b) in pairs if a != b), length)

    def add(self, choices: Sequence[tuple[int, float]]) -> None:
        """One more token of the chain: the best of these, and the further ones."""
        (best, confidence), *further = choices
        self.chain.append(best)
        self.confidence.append(confidence)
        self.further.append(further)

    def learn(self, written: Sequence[int]) -> None:
        """Let the chances know what the text has had in this place, as far as a source foresaw."""
        for depth, (guess, token) in enumerate(zip(self.lookup, written, strict=False)):
            expected = self.chances.lookup(self.length + depth)
            self.chances.learn("lookup", expected, guess == token)
            if guess != token:
                break
        for drafted, confidence, token in zip(self.chain, self.confidence, written, strict=False):
            self.chances.learn("chain", self.chances.chain(confidence), drafted == token)
            if drafted != token:
                break


@dataclass
class CandidateNodes:
    """All nodes that the sources offer, a parent before its children: parents, where 0 is the root
    and i the i-th node; the chance that a node's whole path is right, and that the chain is."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    of_chain: float = 1.0

    def add(self, token: int, parent: int, gain: float) -> int:
        """A node, and its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.gains.append(gain)
        return len(self.tokens)


def drafting_pays(costs: Costs, sources: Sources, most: int) -> bool:
    """Whether a further token of the chain may be expected to make the tree, of `most` nodes at
    most, worth more than it costs to draft."""
    nodes, drafted = candidates(sources), len(sources.chain)
    adds, cost = NEXT, costs.draft
    if sources.shared == drafted < len(sources.lookup):  # it may say the same once more
        foreseen = sources.chances.lookup(sources.length + drafted)
        adds = NEXT_BESIDE * (1 - foreseen)
        cost -= costs.states * foreseen  # where the lookup is right the chain most often agrees
    _, before = best_size(costs, sorted(nodes.gains, reverse=True)[:most])
    gains = [*nodes.gains, nodes.of_chain * adds]
    _, after = best_size(costs, sorted(gains, reverse=True)[:most])
    return after - before > costs.min_gain_per_step * cost


def best_tree(costs: Costs, sources: Sources, most: int) -> tuple[list[int], list[int]]:
    """Tokens and parents, as `Draft.listed` takes them, of the tree of `most` nodes at most that
    gains most for its cost. The gain of a node is the chance that its whole path is right. No
    parent's is lower than its child's, so the best n nodes are a tree.
    """
    nodes = candidates(sources)
    # of equals the earlier is first, so that a parent is
    order = sorted(range(len(nodes.gains)), key=lambda node: -nodes.gains[node])[:most]
    count, _ = best_size(costs, [nodes.gains[node] for node in order])
    kept = sorted(order[:count])
    number = {0: 0} | {node + 1: i for i, node in enumerate(kept, start=1)}
    return [nodes.tokens[node] for node in kept], [number[nodes.parents[node]] for node in kept]


def best_size(costs: Costs, gains: Sequence[float]) -> tuple[int, float]:
    """How many nodes gain most beyond what they cost, and how much; the largest gains are first."""
    count, best, gain = 0, 0.0, 0.0
    for size, of_node in enumerate(gains, start=1):
        gain += of_node
        if gain - costs.of_nodes(size) > best:
            count, best = size, gain - costs.of_nodes(size)
    return count, best


def candidates(sources: Sources) -> CandidateNodes:
    """What both say is one node, and is trusted for both reasons."""
    lookup, chain, same = sources.lookup, sources.chain, sources.shared
    foreseen = [sources.chances.lookup(sources.length + depth) for depth in range(len(lookup))]
    drafted = [sources.chances.chain(confidence) for confidence in sources.confidence]
    nodes, fork, of_fork = CandidateNodes(), 0, 1.0
    for depth in range(same):
        wrong = (1 - foreseen[depth]) * (1 - drafted[depth])
        node = nodes.add(chain[depth], fork, of_fork * (1 - wrong))
        _add_further(sources, nodes, depth, fork, of_fork * wrong)
        fork, of_fork = node, of_fork * (1 - wrong)
    # from here on at most one of them is right
    end, gain, left = fork, of_fork, of_fork
    for depth in range(same, len(lookup)):
        gain *= foreseen[depth] * (1 - drafted[depth] if depth == same < len(chain) else 1)
        end = nodes.add(lookup[depth], end, gain)
        if depth == same:
            left -= gain
    end, gain = fork, of_fork
    for depth in range(same, len(chain)):
        right = gain * drafted[depth] * (1 - foreseen[depth] if depth == same < len(lookup) else 1)
        node = nodes.add(chain[depth], end, right)
        _add_further(sources, nodes, depth, end, (gain if depth > same else left) - right)
        end, gain = node, right
    nodes.of_chain = gain
    return nodes


def _add_further(
    sources: Sources, nodes: CandidateNodes, depth: int, parent: int, left: float
) -> None:
    """The next best choices for a token of the chain; `left` is the chance that all before it is
    right, and neither it nor the lookup's token."""
    guess = sources.lookup[depth] if depth < len(sources.lookup) else None
    rest = 1 - sources.confidence[depth]  # the probability of all that are no better choices
    for token, probability in sources.further[depth]:
        if token != guess or depth > sources.shared:
            right = max(left, 0.0) * min(probability / max(rest, 1e-6), 1.0)
            nodes.add(token, parent, right)
            left -= right
        rest -= probability
