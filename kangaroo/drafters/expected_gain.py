"""Which tokens of two sources are verified: those whose chance to be right pays for their place.

Plain lists and floats, tens of microseconds a round: this runs between two passes of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kangaroo.drafters.odds import Odds


@dataclass(frozen=True)
class Costs:
    """What work costs, in vanilla steps.

    Args:
        verify: of verifying 0, 1, 2, ... nodes beside the root.
        draft: of a token of the chain.
        pace: tokens that are written in the time of a vanilla step; so many a node, or a drafted
            token, has to gain for each vanilla step that it costs.
        states: the part of `draft` that is saved where the lookup says the same token, whose states
            were computed together with the pending token's.
    """

    verify: Sequence[float]
    draft: float
    pace: float
    states: float = 0.0

    def of_nodes(self, count: int) -> float:
        """Tokens that this many nodes have to gain."""
        return self.pace * (self.verify[count] - self.verify[0])


@dataclass
class Sources:
    """What a round has to choose from.

    Args:
        length: tokens at the end of the text that the lookup found elsewhere; 0 is no match.
        lookup: what followed there.
        chain: what was drafted, as far as it goes.
        confidence: the top-1 probability at each token of the chain.
        further: the next best choices for the chain's first token, and their probabilities.
    """

    length: int
    lookup: list[int]
    chain: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    further: list[tuple[int, float]] = field(default_factory=list)

    @property
    def shared(self) -> int:
        """How many tokens both say from the first on."""
        depth, most = 0, min(len(self.lookup), len(self.chain))
        while depth < most and self.lookup[depth] == self.chain[depth]:
            depth += 1
        return depth


def drafting_pays(odds: Odds, costs: Costs, sources: Sources) -> bool:
    """Whether one more token of the chain may be expected to gain what it and its node cost."""
    shared, drafted = sources.shared, len(sources.chain)
    gain = 1.0
    for depth in range(shared):
        gain *= _same(odds, sources, depth)
    for depth in range(shared, drafted):
        gain *= _chain(odds, sources, depth, shared)
    found = shared == drafted and drafted < len(sources.lookup)  # it may still say the same
    adds, cost = odds.adds[0], costs.draft
    if found:
        row = odds.row(sources.length + drafted)
        adds = odds.adds[1 + row]
        cost -= costs.states * odds.lookup[row]  # where it is right the chain most often agrees
    return gain * adds > costs.pace * cost + costs.of_nodes(1)


def tree(odds: Odds, costs: Costs, sources: Sources, most: int) -> tuple[list[int], list[int]]:
    """Tokens and parents, as `Draft.listed` takes them, of the tree that gains most for its cost.

    The gain of a node is the chance that its whole path is right. No parent's is lower than its
    child's, so the best n nodes are a tree.

    Args:
        most: nodes beside the root.
    """
    tokens, parents, gains = candidates(odds, sources)
    # of equals the earlier is first, so that a parent is
    order = sorted(range(len(tokens)), key=lambda node: -gains[node])[:most]
    count, best, gain = 0, 0.0, 0.0
    for size, node in enumerate(order, start=1):
        gain += gains[node]
        if gain - costs.of_nodes(size) > best:
            count, best = size, gain - costs.of_nodes(size)
    kept = sorted(order[:count])
    number = {0: 0} | {node + 1: i for i, node in enumerate(kept, start=1)}
    return [tokens[node] for node in kept], [number[parents[node]] for node in kept]


def candidates(odds: Odds, sources: Sources) -> tuple[list[int], list[int], list[float]]:
    """All nodes that the sources offer, a parent before its children: tokens, parents (0 is the
    root, i the i-th node), gains.

    What both say is one node, and is trusted for both reasons.
    """
    lookup, chain, shared = sources.lookup, sources.chain, sources.shared
    tokens: list[int] = []
    parents: list[int] = []
    gains: list[float] = []

    def add(path: Sequence[int], share: list[float], parent: int, gain: float) -> None:
        for token, right in zip(path, share, strict=True):
            gain *= right
            tokens.append(token)
            parents.append(parent)
            gains.append(gain)
            parent = len(tokens)

    add(lookup[:shared], [_same(odds, sources, depth) for depth in range(shared)], 0, 1.0)
    fork = gains[-1] if shared else 1.0
    depths = range(shared, len(lookup))
    add(lookup[shared:], [_lookup(odds, sources, depth, shared) for depth in depths], shared, fork)
    depths = range(shared, len(chain))
    add(chain[shared:], [_chain(odds, sources, depth, shared) for depth in depths], shared, fork)
    left = 1.0 - sum(gain for gain, parent in zip(gains, parents, strict=True) if not parent)
    for token, probability in sources.further:
        if token not in lookup[:1]:
            right = max(left, 0.0) * odds.runner_up[odds.column(probability)]
            add([token], [right], 0, 1.0)
            left -= right
    return tokens, parents, gains


def _same(odds: Odds, sources: Sources, depth: int) -> float:
    """How often a token is right that both say."""
    row = odds.row(sources.length + depth)
    return odds.same[row][odds.column(sources.confidence[depth])]


def _lookup(odds: Odds, sources: Sources, depth: int, shared: int) -> float:
    """How often the lookup's token is right, from where both no longer say the same."""
    row = odds.row(sources.length + depth)
    if depth > shared or shared == len(sources.chain):  # the chain says nothing here
        return odds.lookup[row]
    chosen = depth == 0 and any(token == sources.lookup[0] for token, _ in sources.further)
    table = odds.further if chosen else odds.other
    return table[row][odds.column(sources.confidence[depth])]


def _chain(odds: Odds, sources: Sources, depth: int, shared: int) -> float:
    """How often the chain's token is right, from where both no longer say the same."""
    column = odds.column(sources.confidence[depth])
    if depth > shared or shared == len(sources.lookup):  # the lookup says nothing here
        return odds.chain[column]
    return odds.against[odds.row(sources.length + depth)][column]
