"""Which nodes are verified, against all trees there are; and when drafting goes on."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from kangaroo.drafters.acceptance import assumed
from kangaroo.drafters.expected_gain import Costs, Sources, best_tree, candidates, drafting_pays
from kangaroo.drafters.hybrid import verify_curve

ODDS = assumed()
CHEAP = Costs([1.0] * 20, 0.0, 1.0)


def random_sources(rng: random.Random) -> Sources:
    """Of few tokens, so that the two often say the same."""
    chain = [rng.randrange(3) for _ in range(rng.randrange(4))]
    lookup = [rng.randrange(3) for _ in range(rng.randrange(5))]
    further = [
        [(token, rng.uniform(0.01, 0.3)) for token in range(3) if token != best] for best in chain
    ]
    length = rng.randrange(1, 20) if lookup else 0
    return Sources(length, lookup, chain, [rng.random() for _ in chain], further)


def shape(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """A tree as the paths of its nodes."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths), "two nodes of one path"
    return set(paths[1:])


@pytest.mark.parametrize("min_gain_per_step", [1.0, 2.5])
@pytest.mark.parametrize("most", [1, 3, 6])
def test_the_tree_is_the_best_of_all_trees(most, min_gain_per_step):
    rng, sizes = random.Random(most), set()
    costs = Costs([1, 1.1, 1.15, 1.2, 1.6, 1.7, 1.9], 0.05, min_gain_per_step)
    for _ in range(60):
        sources = random_sources(rng)
        nodes = candidates(ODDS, sources)
        tokens, parents, gains = nodes.tokens, nodes.parents, nodes.gains
        worth = {(): 0.0}
        for count in range(1, min(most, len(tokens)) + 1):
            for some in itertools.combinations(range(len(tokens)), count):
                if all(not parents[node] or parents[node] - 1 in some for node in some):
                    worth[some] = sum(gains[node] for node in some) - costs.of_nodes(count)
        own_tokens, own_parents = best_tree(ODDS, costs, sources, most)
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
        for depth, further in enumerate(sources.further):
            said |= {(*sources.chain[:depth], token) for token, _ in further}
        nodes = candidates(ODDS, sources)
        assert shape(nodes.tokens, nodes.parents) == said
        of_children = dict.fromkeys(range(len(nodes.tokens) + 1), 0.0)
        for gain, parent in zip(nodes.gains, nodes.parents, strict=True):
            assert gain >= 0
            of_children[parent] += gain
        for parent, gain in of_children.items():
            assert gain <= (nodes.gains[parent - 1] if parent else 1) + 1e-9


def test_what_both_say_is_trusted_for_both_reasons():
    both = candidates(ODDS, Sources(2, [5, 6], [5, 7], [0.6, 0.4], [[], []]))
    assert (both.tokens, both.parents) == ([5, 6, 7], [0, 1, 1])
    row, column = ODDS.row(2), ODDS.column(0.6)
    assert both.gains[0] == ODDS.same[row][column]
    # from where they part, each is judged by the match that the first token has made longer
    longer, column = ODDS.row(3), ODDS.column(0.4)
    assert both.gains[1] == both.gains[0] * ODDS.other[longer][column]
    assert both.gains[2] == both.gains[0] * ODDS.against[longer][column]
    assert both.of_chain == both.gains[2]


def test_a_further_choice_of_the_chain_that_the_lookup_says_too_is_one_node():
    acceptance = replace(ODDS, further=[[0.77] * 8] * 7)
    nodes = candidates(acceptance, Sources(4, [8], [5], [0.4], [[(8, 0.3), (9, 0.1)]]))
    assert nodes.tokens == [8, 5, 9] and nodes.gains[0] == 0.77
    # and so in the middle of the chain, where both have said the same before
    further = [[(1, 0.2)], [(8, 0.3), (9, 0.1)]]
    nodes = candidates(acceptance, Sources(4, [4, 8], [4, 5], [0.7, 0.4], further))
    assert nodes.tokens == [4, 1, 8, 5, 9] and nodes.parents == [0, 0, 1, 1, 1]
    assert nodes.gains[2] == nodes.gains[0] * 0.77


def test_further_choices_share_what_the_better_ones_of_their_place_leave():
    acceptance = replace(ODDS, chain=[0.5] * 8, runner_up=[0.4] * 8)
    further = [[(8, 0.3), (9, 0.1)], [(8, 0.3), (9, 0.1)]]
    nodes = candidates(acceptance, Sources(0, [], [5, 6], [0.6, 0.6], further))
    assert nodes.tokens == [5, 8, 9, 6, 8, 9] and nodes.parents == [0, 0, 0, 1, 1, 1]
    assert nodes.gains == pytest.approx([0.5, 0.2, 0.12, 0.25, 0.1, 0.06])


def test_alone_a_source_is_judged_by_itself():
    length, confidence = 3, 0.6
    gains = candidates(ODDS, Sources(length, [1, 2])).gains
    assert gains == [ODDS.lookup[ODDS.row(3)], ODDS.lookup[ODDS.row(3)] * ODDS.lookup[ODDS.row(4)]]
    gains = candidates(ODDS, Sources(0, [], [1, 2], [confidence, 0.2], [[], []])).gains
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
    sources.further = [[] for _ in sources.chain]
    costs = Costs([1 + 0.03 * node for node in range(20)], 0.05, 1.5)
    assert drafting_pays(ODDS, costs, sources, 15) == pays
    assert drafting_pays(ODDS, CHEAP, sources, 15)
    assert not drafting_pays(ODDS, replace(costs, draft=0.5), sources, 15)


def test_what_the_first_node_costs_is_paid_once_for_all_that_are_verified():
    costs = Costs([1.0, *[1.2] * 15], 0.05, 1.5)  # any nodes cost 0.3 tokens together
    acceptance = replace(ODDS, lookup=[0.5] * 7, adds=[0.25, *[0.2] * 7])
    assert not drafting_pays(acceptance, costs, Sources(0, []), 15)
    assert drafting_pays(
        acceptance, costs, Sources(2, [5, 6]), 15
    )  # whose tokens are verified anyway
    assert not drafting_pays(acceptance, costs, Sources(2, [5, 6]), 2)  # there is no place for it


def test_a_pass_over_so_many_tokens_costs_what_lies_between_the_known_widths():
    curve = verify_curve([1.0, 1.2, 1.4, 2.0], 10)
    assert curve[:8] == pytest.approx([1.0, 1.2, 1.3, 1.4, 1.55, 1.7, 1.85, 2.0])
    assert curve[8:] == pytest.approx([2.15, 2.3, 2.45])  # goes on as before


def test_a_token_that_the_lookup_says_too_costs_less_to_draft():
    sources = Sources(1, [5, 6])
    acceptance = replace(assumed(), adds=[0.0, 0.1, *[0.0] * 6], lookup=[0.5] * 7)
    dear = Costs([1.0] * 9, 0.15, 1.0)
    assert not drafting_pays(acceptance, dear, sources, 8)
    assert drafting_pays(acceptance, replace(dear, states=0.12), sources, 8)
    assert not drafting_pays(acceptance, replace(dear, states=0.12), Sources(0, []), 8)
