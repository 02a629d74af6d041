"""What the hybrid drafts, in every round; what is verified, against all trees there are."""

import random
from dataclasses import replace

import cases
import pytest
from cases import NEW_TOKENS, PROMPTS, Case, accepted, choices_without_cache, rounds_of
from helpers import adapter_for, admit_text, check_drafts, longest_earlier_match, paths_of, tiny

from kangaroo.drafters import expected_gain
from kangaroo.drafters.expected_gain import Costs, DraftedChain, Lookup, Sources
from kangaroo.drafters.hybrid import Hybrid, HybridConfig
from kangaroo.drafters.suffix import SuffixAutomaton
from kangaroo.drafters.token_recycling import TokenRecycling
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling

NODES, STEPS = 6, 3
COSTS = Costs([1 + 0.02 * node for node in range(NODES + 1)], 0.05, 1.0)
CHEAP = Costs([1 + 1e-9 * node for node in range(99)], 0.0, 1.0)
MATRIX = {0: [1], 1: [0], 2: [2]}


def expected_sources(case: Case, drafter: Hybrid, row: int, text, sampling, seed) -> Sources:
    """What the sources say after a text, trusted as the drafter's are."""
    trusted = drafter.rows.get(row, text)
    length, _ = longest_earlier_match(text)
    lookup, chain = Lookup(), DraftedChain()
    lookup.shift, chain.shift = trusted.lookup.shift, trusted.chain.shift
    (automaton := SuffixAutomaton()).follow(text)
    lookup.set_match(length, automaton.continuation(NODES))
    sources = Sources(lookup, chain)
    while len(chain.tokens) < STEPS and expected_gain.drafting_pays(COSTS, sources, NODES):
        chain.add(choices_without_cache(case, text, chain.tokens, sampling, seed, 3))
        if chain.confidence <= drafter.threshold:
            break
    return sources


@pytest.mark.parametrize("beside", [0.45, 0.0], ids=["drafts", "drafts where nothing matches"])
@pytest.mark.parametrize("rows, threshold", [(1, 0.0), (3, 0.4)])
def test_the_tree_is_made_of_the_lookup_and_of_what_the_adapter_drafts_without_a_cache(
    case, monkeypatch, sampling, rows, threshold, beside
):
    monkeypatch.setattr(expected_gain, "NEXT_CHANCE_WITH_LOOKUP", beside)
    drafted = []
    options = HybridConfig(steps=STEPS, threshold=threshold, nodes=NODES)
    drafter = cases.with_costs(Hybrid(case.lm, case.adapter, options), COSTS)

    def check(batch, draft, row):
        text, seed = batch.texts[row], batch.seeds[row]
        sources = expected_sources(case, drafter, row, text, sampling, seed)
        assert paths_of(draft, row)[1:] == paths(*expected_gain.best_tree(COSTS, sources, NODES))
        drafted.append(len(sources.chain.tokens))
        assert (draft.valid_BN[batch.done_B].sum(1) == 1).all()

    check_drafts(drafter, check)
    # rounds with and without drafting lie behind later drafts, and accepted paths of all lengths
    lengths = accepted(drafter, case.lm, sampling, rows)
    assert {0, 1} < lengths
    assert len(set(drafted)) > 1 and (0 in drafted) == (beside == 0)


def test_a_draft_ends_with_what_ends_the_text():
    lm = tiny("llama", eos_token_id=5)
    drafter = Hybrid(lm, adapter_for(lm), HybridConfig(threshold=0, nodes=NODES))
    engine = Engine(lm, cases.with_costs(drafter, COSTS))
    for ignored, expected in (False, [3, 5]), (True, [3, 5, 4, 1, 2, 3]):
        session = engine.open(1, 60, Sampling())
        batch = session.batch
        admit_text(session, 0, [1, 2, 3, 5, 4, 1, 2], ignore_eos=ignored)
        assert drafter.update_sources(batch, 0).lookup.tokens == expected


def shifts(sources: Sources) -> list[float]:
    return [source.shift for source in sources.all]


@pytest.mark.parametrize(
    "build",
    [lambda x: cases.hybrid(x, NODES, 0.02), lambda _: TokenRecycling(6)],
    ids=["hybrid", "token recycling"],
)
def test_the_same_text_takes_the_same_rounds_alone_and_in_a_batch(case, sampling, build):
    engine = Engine(case.lm, build(case), always_drafts=True)
    done = [engine.generate(PROMPTS, NEW_TOKENS, sampling, rows) for rows in (1, 4, 1)]
    rounds = list(map(rounds_of, done))
    assert rounds[0] == rounds[1] == rounds[2]


def sources_of(length: int, lookup: list[int], *chain: list[tuple[int, float]]) -> Sources:
    sources = Sources(Lookup(), DraftedChain())
    sources.lookup.set_match(length, lookup)
    for ranked in chain:
        sources.chain.add(ranked)
    return sources


def random_sources(rng: random.Random) -> Sources:
    """Of few tokens, so that they often say the same."""
    chain = []
    for _ in range(rng.randrange(4)):
        first, second, third = rng.sample(range(3), 3)
        best, next_best = rng.random(), rng.random() / 2
        chain.append([(first, best), (second, (1 - best) * next_best), (third, 0.01 * (1 - best))])
    matches = [[rng.randrange(3) for _ in range(rng.randrange(5))] for _ in range(2)]
    sources = sources_of(rng.randrange(1, 20), matches[0], *chain)
    if rng.random() < 0.5:
        return sources
    (store := Lookup()).set_match(rng.randrange(1, 20), matches[1])
    sources.all.insert(1, store)
    return sources


def gains(sources: Sources, depth: int) -> dict[tuple[int, ...], float]:
    of_paths, last = {}, [((), 1.0, sources.places)]
    for _ in range(depth):
        last = [
            ((*path, token), gain * chance, expected_gain.places_after(places, token))
            for path, gain, places in last
            for token, chance in expected_gain.next_tokens(expected_gain.predictions_at(places))
        ]
        of_paths |= {path: gain for path, gain, _ in last}
    return of_paths


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    of_nodes: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        of_nodes.append((*of_nodes[parent], token))
    assert len(set(of_nodes)) == len(of_nodes), "two nodes of one path"
    return of_nodes[1:]


@pytest.mark.parametrize("min_gain_per_step", [1.0, 2.5])
@pytest.mark.parametrize("most", [1, 3, 6])
def test_the_tree_is_the_best_of_all_trees(most, min_gain_per_step):
    rng, sizes = random.Random(most), set()
    costs = Costs([1, 1.1, 1.15, 1.2, 1.6, 1.7, 1.9], 0.05, min_gain_per_step)
    for _ in range(60):
        of_paths = gains(sources := random_sources(rng), depth=min(most, 5))
        chosen = paths(*expected_gain.best_tree(costs, sources, most))
        assert all(path[:-1] in ((), *chosen) for path in chosen)
        # a child's gain is no higher than its parent's, so the likeliest nodes are a tree
        ordered = sorted(of_paths.values(), reverse=True)[:most]
        worth = [sum(ordered[:n]) - costs.min_gain(n) for n in range(len(ordered) + 1)]
        chosen_gain = sum(of_paths.get(path, 0.0) for path in chosen)
        assert chosen_gain - costs.min_gain(len(chosen)) == pytest.approx(max(worth), abs=1e-12)
        sizes.add(len(chosen))
    assert len(sizes) > 1


def test_nothing_that_a_source_says_is_lost_and_chances_are_a_distribution():
    rng = random.Random(7)
    for _ in range(200):
        sources = random_sources(rng)
        lookups = [source for source in sources.all if isinstance(source, Lookup)]
        named = {tuple(line.tokens[: n + 1]) for line in lookups for n in range(4)}
        for depth, further in enumerate(sources.chain.alternatives):
            start = tuple(sources.chain.tokens[:depth])
            named |= {(*start, sources.chain.tokens[depth]), *((*start, x) for x, _ in further)}
        of_paths = gains(sources, 4)
        assert named - {()} <= set(of_paths)
        of_children: dict[tuple[int, ...], float] = {}
        for path, gain in of_paths.items():
            of_children[path[:-1]] = of_children.get(path[:-1], 0.0) + gain
        for path, gain in of_children.items():
            assert 0 <= gain <= of_paths.get(path, 1.0) + 1e-9


def test_a_text_teaches_how_far_to_trust_each_source_and_only_what_it_shows():
    sources = sources_of(2, [5, 6, 7], [(5, 0.6)], [(9, 0.6)])
    sources.learn([5])
    raised = shifts(sources)
    assert raised[0] > Lookup.shift and raised[1] > DraftedChain.shift
    sources.learn([])
    assert shifts(sources) == raised
    chance = sources.lookup.choices(0)[0][1]
    sources.learn([8, 6, 7])  # from where a source is wrong, what it says next shows nothing
    assert sources.lookup.shift == raised[0] - expected_gain.RATE * chance
    for _ in range(99):
        sources.learn([8])
    assert all(source.choices(0)[0][1] < 0.1 for source in sources.all)


@pytest.mark.parametrize(
    "sources, pays",
    [
        (sources_of(1, []), True),  # nothing is known
        (sources_of(1, [5, 6]), True),  # hardly anything
        (sources_of(40, [5, 6]), False),  # the lookup is nearly sure
        (sources_of(1, [], [(5, 0.8)]), True),
        (sources_of(1, [], [(5, 0.1)]), False),  # the chain has become unsure
        (sources_of(1, [], [(5, 0.4)], [(6, 0.4)], [(7, 0.4)]), False),
        (sources_of(2, [5, 6, 7], [(5, 0.8)]), True),  # the match is short
        (sources_of(16, [5, 6, 7], [(5, 0.8)]), False),
        (sources_of(16, [5, 6, 7], [(9, 0.8)]), False),  # it is likelier
    ],
)
def test_a_token_is_drafted_where_it_may_gain_more_than_it_costs(sources, pays):
    costs = Costs([1 + 0.03 * node for node in range(20)], 0.05, 1.5)
    assert expected_gain.drafting_pays(costs, sources, 15) == pays
    assert expected_gain.drafting_pays(CHEAP, sources, 15)
    assert not expected_gain.drafting_pays(replace(costs, draft=0.5), sources, 15)
