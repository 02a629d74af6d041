"""Which nodes are verified, against all trees there are; and when drafting goes on."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from kangaroo.drafters.expected_gain import Costs, Sources, candidates, drafting_pays, tree
from kangaroo.drafters.hybrid import verify_curve
from kangaroo.drafters.odds import assumed

ODDS = assumed()
CHEAP = Costs([1.0] * 20, 0.0, 1.0)


def random_sources(rng: random.Random) -> Sources:
    """Of few tokens, so that the two often say the same."""
    chain = [rng.randrange(3) for _ in range(rng.randrange(4))]
    lookup = [rng.randrange(3) for _ in range(rng.randrange(5))]
    others = [token for token in range(3) if token not in chain[:1]]
    further = [(token, rng.uniform(0.01, 0.3)) for token in others] if chain else []
    length = rng.randrange(1, 20) if lookup else 0
    return Sources(length, lookup, chain, [rng.random() for _ in chain], further)


def shape(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """A tree as the paths of its nodes."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths), "two nodes of one path"
    return set(paths[1:])


@pytest.mark.parametrize("pace", [1.0, 2.5])
@pytest.mark.parametrize("most", [1, 3, 6])
def test_the_tree_is_the_best_of_all_trees(most, pace):
    rng, sizes = random.Random(most), set()
    costs = Costs([1, 1.1, 1.15, 1.2, 1.6, 1.7, 1.9], 0.05, pace)
    for _ in range(60):
        sources = random_sources(rng)
        tokens, parents, gains = candidates(ODDS, sources)
        worth = {(): 0.0}
        for count in range(1, min(most, len(tokens)) + 1):
            for nodes in itertools.combinations(range(len(tokens)), count):
                if all(not parents[node] or parents[node] - 1 in nodes for node in nodes):
                    worth[nodes] = sum(gains[node] for node in nodes) - costs.of_nodes(count)
        own_tokens, own_parents = tree(ODDS, costs, sources, most)
        number = {path: i for i, path in enumerate(all_paths(tokens, parents))}
        chosen = tuple(sorted(number[path] for path in shape(own_tokens, own_parents)))
        assert worth[chosen] == pytest.approx(max(worth.values()), abs=1e-12)
        sizes.add(len(chosen))
    assert len(sizes) > 1


def all_paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_nothing_that_a_source_says_is_lost_and_nothing_comes_twice():
    rng = random.Random(7)
    for _ in range(200):
        sources = random_sources(rng)
        said = {tuple(sources.lookup[:n]) for n in range(1, len(sources.lookup) + 1)}
        said |= {tuple(sources.chain[:n]) for n in range(1, len(sources.chain) + 1)}
        said |= {(token,) for token, _ in sources.further}
        tokens, parents, gains = candidates(ODDS, sources)
        assert shape(tokens, parents) == said
        for gain, parent in zip(gains, parents, strict=True):
            assert 0 <= gain <= (gains[parent - 1] if parent else 1)
        assert sum(g for g, parent in zip(gains, parents, strict=True) if not parent) <= 1 + 1e-9


def test_what_both_say_is_trusted_for_both_reasons():
    both = candidates(ODDS, Sources(2, [5, 6], [5, 7], [0.6, 0.4]))
    assert both[:2] == ([5, 6, 7], [0, 1, 1])
    row, column = ODDS.row(2), ODDS.column(0.6)
    assert both[2][0] == ODDS.same[row][column]
    # from where they part, each is judged by the match that the first token has made longer
    longer, column = ODDS.row(3), ODDS.column(0.4)
    assert both[2][1] == both[2][0] * ODDS.other[longer][column]
    assert both[2][2] == both[2][0] * ODDS.against[longer][column]


def test_a_further_choice_of_the_chain_that_the_lookup_says_too_is_one_node():
    odds = replace(ODDS, further=[[0.77] * 8] * 7)
    tokens, _, gains = candidates(odds, Sources(4, [8], [5], [0.4], [(8, 0.3), (9, 0.1)]))
    assert tokens == [8, 5, 9] and gains[0] == 0.77


def test_alone_a_source_is_judged_by_itself():
    length, confidence = 3, 0.6
    _, _, gains = candidates(ODDS, Sources(length, [1, 2], [], []))
    assert gains == [ODDS.lookup[ODDS.row(3)], ODDS.lookup[ODDS.row(3)] * ODDS.lookup[ODDS.row(4)]]
    _, _, gains = candidates(ODDS, Sources(0, [], [1, 2], [confidence, 0.2]))
    first = ODDS.chain[ODDS.column(confidence)]
    assert gains == [first, first * ODDS.chain[ODDS.column(0.2)]]


@pytest.mark.parametrize(
    "sources, pays",
    [
        (Sources(0, []), True),  # nothing is known
        (Sources(1, [5, 6]), True),  # hardly anything
        (Sources(40, [5, 6]), False),  # the lookup is nearly sure
        (Sources(0, [], [5], [0.8]), True),
        (Sources(0, [], [5], [0.2]), False),  # the chain has become unsure
        (Sources(0, [], [5, 6, 7], [0.6, 0.6, 0.6]), False),
        (Sources(2, [5, 6, 7], [5], [0.8]), True),  # both agree, and the match is still short
        (Sources(16, [5, 6, 7], [5], [0.8]), False),
        (Sources(16, [5, 6, 7], [9], [0.8]), False),  # they differ, and the lookup is likelier
    ],
)
def test_a_token_is_drafted_where_it_may_gain_more_than_it_costs(sources, pays):
    costs = Costs([1, 1.03], 0.05, 1.5)
    assert drafting_pays(ODDS, costs, sources) == pays
    assert drafting_pays(ODDS, CHEAP, sources)
    assert not drafting_pays(ODDS, replace(costs, draft=0.5), sources)


def test_a_pass_over_so_many_tokens_costs_what_lies_between_the_known_widths():
    curve = verify_curve([1.0, 1.2, 1.4, 2.0], 10)
    assert curve[:8] == pytest.approx([1.0, 1.2, 1.3, 1.4, 1.55, 1.7, 1.85, 2.0])
    assert curve[8:] == pytest.approx([2.15, 2.3, 2.45])  # goes on as before


def test_a_token_that_the_lookup_says_too_costs_less_to_draft():
    sources = Sources(1, [5, 6])
    odds = replace(assumed(), adds=[0.0, 0.1, *[0.0] * 6], lookup=[0.5] * 7)
    dear = Costs([1, 1], 0.15, 1.0)
    assert not drafting_pays(odds, dear, sources)
    assert drafting_pays(odds, replace(dear, states=0.12), sources)
    assert not drafting_pays(odds, replace(dear, states=0.12), Sources(0, []))
