"""Which nodes are verified, against all trees there are; and when drafting goes on."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from kangaroo.drafters import expected_gain
from kangaroo.drafters.expected_gain import (
    Chances,
    Costs,
    Sources,
    best_tree,
    candidates,
    drafting_pays,
)

START = Chances()
CHEAP = Costs([1.0] * 20, 0.0, 1.0)


def random_sources(rng: random.Random) -> Sources:
    """Of few tokens, so that the two often say the same."""
    chain = [rng.randrange(3) for _ in range(rng.randrange(4))]
    lookup = [rng.randrange(3) for _ in range(rng.randrange(5))]
    further = [
        [(token, rng.uniform(0.01, 0.3)) for token in range(3) if token != best] for best in chain
    ]
    length = rng.randrange(1, 20) if lookup else 0
    return Sources(START, length, lookup, chain, [rng.random() for _ in chain], further)


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
        nodes = candidates(sources)
        tokens, parents, gains = nodes.tokens, nodes.parents, nodes.gains
        worth = {(): 0.0}
        for count in range(1, min(most, len(tokens)) + 1):
            for some in itertools.combinations(range(len(tokens)), count):
                if all(not parents[node] or parents[node] - 1 in some for node in some):
                    worth[some] = sum(gains[node] for node in some) - costs.of_nodes(count)
        own_tokens, own_parents = best_tree(costs, sources, most)
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
        nodes = candidates(sources)
        assert shape(nodes.tokens, nodes.parents) == said
        of_children = dict.fromkeys(range(len(nodes.tokens) + 1), 0.0)
        for gain, parent in zip(nodes.gains, nodes.parents, strict=True):
            assert gain >= 0
            of_children[parent] += gain
        for parent, gain in of_children.items():
            assert gain <= (nodes.gains[parent - 1] if parent else 1) + 1e-9


def test_what_both_say_is_trusted_for_both_reasons():
    both = candidates(Sources(START, 2, [5, 6], [5, 7], [0.6, 0.4], [[], []]))
    assert (both.tokens, both.parents) == ([5, 6, 7], [0, 1, 1])
    first = 1 - (1 - START.lookup(2)) * (1 - START.chain(0.6))
    # from where they part, each is judged by the match that the first token has made longer
    longer, drafted = START.lookup(3), START.chain(0.4)
    parted = longer * (1 - drafted), drafted * (1 - longer)
    assert both.gains == pytest.approx([first, *(first * gain for gain in parted)])
    assert both.of_chain == both.gains[2]


def test_a_further_choice_of_the_chain_that_the_lookup_says_too_is_one_node():
    nodes = candidates(Sources(START, 4, [8], [5], [0.4], [[(8, 0.3), (9, 0.1)]]))
    assert nodes.tokens == [8, 5, 9]
    assert nodes.gains[0] == pytest.approx(START.lookup(4) * (1 - START.chain(0.4)))
    # and so in the middle of the chain, where both have said the same before
    further = [[(1, 0.2)], [(8, 0.3), (9, 0.1)]]
    nodes = candidates(Sources(START, 4, [4, 8], [4, 5], [0.7, 0.4], further))
    assert nodes.tokens == [4, 1, 8, 5, 9] and nodes.parents == [0, 0, 1, 1, 1]
    other = START.lookup(5) * (1 - START.chain(0.4))
    assert nodes.gains[2] == pytest.approx(nodes.gains[0] * other)


def test_further_choices_share_what_the_better_ones_of_their_place_leave():
    further = [[(8, 0.25), (9, 0.15)]] * 2  # half, and three fifths, of what is left
    nodes = candidates(Sources(START, 0, [], [5, 6], [0.5, 0.5], further))
    assert nodes.tokens == [5, 8, 9, 6, 8, 9] and nodes.parents == [0, 0, 0, 1, 1, 1]
    right = START.chain(0.5)
    of_place = [right, (1 - right) * 0.5, (1 - right) * 0.5 * 0.6]
    assert nodes.gains == pytest.approx([*of_place, *(right * gain for gain in of_place)])


def test_a_text_teaches_how_far_to_trust_each_source_and_only_what_it_shows():
    chances = Chances()
    sources = Sources(chances, 2, [5, 6, 7], [5, 9], [0.6, 0.6])
    sources.learn([5])
    assert chances.lookup(2) > START.lookup(2) and chances.chain(0.6) > START.chain(0.6) > 0.6
    raised = dict(chances.shifts)
    sources.learn([])
    assert chances.shifts == raised
    sources.learn([8, 6, 7])  # from where a source is wrong, what it says next shows nothing
    once = Chances()
    once.shifts = dict(raised)
    once.learn("lookup", once.lookup(2), False)
    assert chances.shifts["lookup"] == once.shifts["lookup"] < raised["lookup"]
    for _ in range(99):
        sources.learn([8])
    assert chances.lookup(2) < 0.1 and chances.chain(0.6) < 0.1


@pytest.mark.parametrize(
    "sources, pays",
    [
        (Sources(START, 0, []), True),  # nothing is known
        (Sources(START, 1, [5, 6]), True),  # hardly anything
        (Sources(START, 40, [5, 6]), False),  # the lookup is nearly sure
        (Sources(START, 0, [], [5], [0.8]), True),
        (Sources(START, 0, [], [5], [0.1]), False),  # the chain has become unsure
        (Sources(START, 0, [], [5, 6, 7], [0.4, 0.4, 0.4]), False),
        (Sources(START, 2, [5, 6, 7], [5], [0.8]), True),  # the match is short
        (Sources(START, 16, [5, 6, 7], [5], [0.8]), False),
        (Sources(START, 16, [5, 6, 7], [9], [0.8]), False),  # it is likelier
    ],
)
def test_a_token_is_drafted_where_it_may_gain_more_than_it_costs(sources, pays):
    sources.further = [[] for _ in sources.chain]
    costs = Costs([1 + 0.03 * node for node in range(20)], 0.05, 1.5)
    assert drafting_pays(costs, sources, 15) == pays
    assert drafting_pays(CHEAP, sources, 15)
    assert not drafting_pays(replace(costs, draft=0.5), sources, 15)


def test_a_token_that_the_lookup_says_too_costs_less_to_draft(monkeypatch):
    monkeypatch.setattr(expected_gain, "NEXT_BESIDE", 0.1)
    monkeypatch.setattr(expected_gain, "NEXT", 0.0)
    sources, dear = Sources(START, 2, [5, 6]), Costs([1.0] * 9, 0.15, 1.0)
    assert not drafting_pays(dear, sources, 8)
    assert drafting_pays(replace(dear, states=0.24), sources, 8)
    assert not drafting_pays(replace(dear, states=0.24), Sources(START, 0, []), 8)
