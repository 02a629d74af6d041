"""Which tokens of two sources are verified: those whose chance to be right pays for their place.

Plain lists and floats, tens of microseconds a round: this runs between two passes of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kangaroo.drafters.acceptance import AcceptanceTable
from kangaroo.drafters.suffix import shared


@dataclass(frozen=True)
class Costs:
    """What work costs, in vanilla steps.

    Args:
        verify: of verifying 0, 1, 2, ... nodes beside the root.
        draft: of a token of the chain.
        min_gain_per_step: tokens that are written in the time of a vanilla step; so many a node, or
            a drafted token, has to gain for each vanilla step that it costs.
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
        chain: what was drafted, as far as it goes.
        confidence: the top-1 probability at each token of the chain.
        further: the next best choices for each of these, and their probabilities.
    """

    length: int
    lookup: list[int]
    chain: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    further: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def shared(self) -> int:
        """How many tokens both say from the first on."""
        return shared(self.lookup, self.chain)

    def add(self, choices: Sequence[tuple[int, float]]) -> None:
        """One more token of the chain: the best of these, and the further ones."""
        (best, confidence), *further = choices
        self.chain.append(best)
        self.confidence.append(confidence)
        self.further.append(further)


@dataclass
class CandidateNodes:
    """All nodes that the sources offer, a parent before its children.

    Args:
        parents: 0 is the root, i the i-th node.
        gains: the chance that a node's whole path is right.
        of_chain: that of the chain's last token; 1 where there is none.
    """

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


def drafting_pays(acceptance: AcceptanceTable, costs: Costs, sources: Sources, most: int) -> bool:
    """Whether a further token of the chain may be expected to make the tree worth more than it
    costs to draft.

    Args:
        most: nodes that a tree may have.
    """
    nodes, drafted = candidates(acceptance, sources), len(sources.chain)
    adds, cost = acceptance.adds[0], costs.draft
    if sources.shared == drafted < len(sources.lookup):  # it may say the same once more
        row = acceptance.row(sources.length + drafted)
        adds = acceptance.adds[1 + row]
        cost -= (
            costs.states * acceptance.lookup[row]
        )  # where it is right the chain most often agrees
    _, before = best_size(costs, sorted(nodes.gains, reverse=True)[:most])
    gains = [*nodes.gains, nodes.of_chain * adds]
    _, after = best_size(costs, sorted(gains, reverse=True)[:most])
    return after - before > costs.min_gain_per_step * cost


def best_tree(
    acceptance: AcceptanceTable, costs: Costs, sources: Sources, most: int
) -> tuple[list[int], list[int]]:
    """Tokens and parents, as `Draft.listed` takes them, of the tree that gains most for its cost.

    The gain of a node is the chance that its whole path is right. No parent's is lower than its
    child's, so the best n nodes are a tree.

    Args:
        most: nodes beside the root.
    """
    nodes = candidates(acceptance, sources)
    # of equals the earlier is first, so that a parent is
    order = sorted(range(len(nodes.gains)), key=lambda node: -nodes.gains[node])[:most]
    count, _ = best_size(costs, [nodes.gains[node] for node in order])
    kept = sorted(order[:count])
    number = {0: 0} | {node + 1: i for i, node in enumerate(kept, start=1)}
    return [nodes.tokens[node] for node in kept], [number[nodes.parents[node]] for node in kept]


def best_size(costs: Costs, gains: Sequence[float]) -> tuple[int, float]:
    """How many nodes gain most beyond what they cost, and how much.

    Args:
        gains: of the nodes, the largest first.
    """
    count, best, gain = 0, 0.0, 0.0
    for size, of_node in enumerate(gains, start=1):
        gain += of_node
        if gain - costs.of_nodes(size) > best:
            count, best = size, gain - costs.of_nodes(size)
    return count, best


def candidates(acceptance: AcceptanceTable, sources: Sources) -> CandidateNodes:
    """What both say is one node, and is trusted for both reasons."""
    lookup, chain, same = sources.lookup, sources.chain, sources.shared
    nodes, fork, of_fork = CandidateNodes(), 0, 1.0
    for depth in range(same):
        right = _same(acceptance, sources, depth)
        node = nodes.add(chain[depth], fork, of_fork * right)
        _add_further(acceptance, sources, nodes, depth, fork, of_fork * (1 - right))
        fork, of_fork = node, of_fork * right
    end, gain, left = fork, of_fork, of_fork
    for depth in range(same, len(lookup)):
        gain *= _lookup(acceptance, sources, depth, same)
        end = nodes.add(lookup[depth], end, gain)
        if depth == same:
            left -= gain
    end, gain = fork, of_fork
    for depth in range(same, len(chain)):
        right = gain * _chain(acceptance, sources, depth, same)
        node = nodes.add(chain[depth], end, right)
        _add_further(
            acceptance, sources, nodes, depth, end, (gain if depth > same else left) - right
        )
        end, gain = node, right
    nodes.of_chain = gain
    return nodes


def _add_further(
    acceptance: AcceptanceTable,
    sources: Sources,
    nodes: CandidateNodes,
    depth: int,
    parent: int,
    left: float,
) -> None:
    """The next best choices for a token of the chain.

    Args:
        left: the chance that all before it is right, and neither it nor the lookup's token.
    """
    guess = sources.lookup[depth] if depth < len(sources.lookup) else None
    for token, probability in sources.further[depth]:
        if token != guess or depth > sources.shared:
            right = max(left, 0.0) * acceptance.runner_up[acceptance.column(probability)]
            nodes.add(token, parent, right)
            left -= right


def _same(acceptance: AcceptanceTable, sources: Sources, depth: int) -> float:
    """How often a token is right that both say."""
    row = acceptance.row(sources.length + depth)
    return acceptance.same[row][acceptance.column(sources.confidence[depth])]


def _lookup(acceptance: AcceptanceTable, sources: Sources, depth: int, shared: int) -> float:
    """How often the lookup's token is right, from where both no longer say the same."""
    row = acceptance.row(sources.length + depth)
    if depth > shared or shared == len(sources.chain):  # the chain says nothing here
        return acceptance.lookup[row]
    chosen = any(token == sources.lookup[depth] for token, _ in sources.further[depth])
    table = acceptance.further if chosen else acceptance.other
    return table[row][acceptance.column(sources.confidence[depth])]


def _chain(acceptance: AcceptanceTable, sources: Sources, depth: int, shared: int) -> float:
    """How often the chain's token is right, from where both no longer say the same."""
    column = acceptance.column(sources.confidence[depth])
    if depth > shared or shared == len(sources.lookup):  # the lookup says nothing here
        return acceptance.chain[column]
    return acceptance.against[acceptance.row(sources.length + depth)][column]
