"""What the hybrid drafts, in every round; what is verified, against all trees there are."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from cases import CHUNK, NEW_TOKENS, PROMPTS, SAMPLINGS, Case, case_of, choices_without_cache
from helpers import adapter_for, admit_text, longest_earlier_match, tiny
from syncs import Syncs

from kangaroo.drafters import expected_gain
from kangaroo.drafters.expected_gain import (
    Chances,
    Costs,
    Sources,
    best_tree,
    candidates,
    drafting_pays,
)
from kangaroo.drafters.hybrid import Hybrid, Lookup
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling

NODES, STEPS = 6, 3
COSTS = Costs([1 + 0.02 * node for node in range(NODES + 1)], 0.05, 1.0)
SAMPLED = SAMPLINGS["sampled"]


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama", "sampled")


@pytest.fixture
def sure(monkeypatch):
    """Where the text matches, nothing is drafted."""
    monkeypatch.setattr(expected_gain, "NEXT_BESIDE", 0.0)


def expected_sources(case: Case, drafter: Hybrid, row: int, text, sampling, seed) -> Sources:
    length, _ = longest_earlier_match(text)
    lookup = Lookup(text).automaton.continuation(NODES)
    sources = Sources(drafter.lookups[row].chances, length, lookup)
    while len(sources.chain) < STEPS and drafting_pays(COSTS, sources, NODES):
        best, *further = choices_without_cache(case, text + sources.chain, sampling, seed)
        sources.further.append(further)
        sources.chain.append(best[0])
        sources.confidence.append(best[1])
        if best[1] <= drafter.threshold:
            break
    return sources


@pytest.mark.parametrize("beside", [0.45, 0.0], ids=["drafts", "drafts where nothing matches"])
@pytest.mark.parametrize("rows, threshold", [(1, 0.0), (3, 0.4)])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_the_tree_is_made_of_the_lookup_and_of_what_the_adapter_drafts_without_a_cache(
    monkeypatch, sampling, rows, threshold, beside
):
    """Texts are right whatever is drafted, so a gap in a cache would cost acceptance unseen."""
    monkeypatch.setattr(expected_gain, "NEXT_BESIDE", beside)
    case = case_of("llama", "sampled" if sampling is SAMPLED else "greedy")
    drafter = Hybrid(case.lm, case.adapter, STEPS, threshold, costs=COSTS, nodes=NODES)
    propose, drafted = drafter.propose, []

    def check(batch):
        draft = propose(batch)
        parents_BN = draft.tree.parents_BN.expand_as(draft.tokens_BN)
        for row in range(batch.size):
            valid_N = draft.valid_BN[row]
            if batch.done_B[row]:
                assert valid_N.sum() == 1
                continue
            seed = int(batch.seeds_B[row])
            sources = expected_sources(case, drafter, row, batch.texts[row], sampling, seed)
            tokens, parents = best_tree(COSTS, sources, NODES)
            assert draft.tokens_BN[row, valid_N][1:].tolist() == tokens
            assert parents_BN[row, valid_N][1:].tolist() == parents
            drafted.append(len(sources.chain))
        return draft

    monkeypatch.setattr(drafter, "propose", check)
    engine = Engine(case.lm, drafter, prefill_chunk=CHUNK)
    done = engine.generate(PROMPTS, NEW_TOKENS, sampling, batch_size=rows)
    assert [p + g.tokens for p, g in zip(PROMPTS, done, strict=True)] == case.texts
    # rounds with and without drafting lie behind later drafts, and accepted paths of all lengths
    assert len(set(drafted)) > 1 and (0 in drafted) == (beside == 0)
    assert {0, 1, 2} <= {step.accepted for generation in done for step in generation.steps}


@pytest.mark.parametrize("rows", [1, 3])
def test_a_round_waits_once_for_the_rows_that_are_done_and_once_for_each_drafted_token(
    monkeypatch, rows
):
    lm = tiny()
    drafter = Hybrid(lm, adapter_for(lm), STEPS, costs=COSTS, nodes=NODES)
    engine = Engine(lm, drafter)
    batch = engine.open(rows, 60, SAMPLED)
    for row in range(rows):
        engine.admit(batch, row, Request(PROMPTS[row], NEW_TOKENS, seed=row))
    for _ in range(4):
        with Syncs(monkeypatch) as syncs:
            draft = drafter.propose(batch)
        monkeypatch.undo()
        drafted = syncs.total - 1
        assert 1 <= drafted <= STEPS and syncs.seen["tolist"] == syncs.total
        monkeypatch.setattr(drafter, "propose", lambda batch, draft=draft: draft)
        with Syncs(monkeypatch) as syncs:
            engine.step(batch)
        monkeypatch.undo()
        assert syncs.total == 1


def test_a_draft_ends_with_what_ends_the_text(sure):
    lm = tiny("llama", eos_token_id=5)
    case = Case(lm, case_of("llama", "greedy").adapter, [])
    drafter = Hybrid(lm, case.adapter, costs=COSTS, nodes=NODES)
    engine = Engine(lm, drafter)
    for ignored, expected in (False, [3, 5]), (True, [3, 5, 4, 1, 2, 3]):
        batch = engine.open(1, 60, Sampling())
        admit_text(engine, batch, 0, [1, 2, 3, 5, 4, 1, 2], ignore_eos=ignored)
        assert drafter.looked_up(batch, 0).lookup == expected


def test_what_a_text_has_taught_is_forgotten_with_it(case):
    drafter = Hybrid(case.lm, case.adapter, costs=COSTS, nodes=NODES)
    engine = Engine(case.lm, drafter)
    batch = engine.open(1, 80, Sampling())
    for _ in range(2):
        engine.admit(batch, 0, Request(PROMPTS[1], NEW_TOKENS))
        assert drafter.looked_up(batch, 0).chances.shifts == expected_gain.START
        while not batch.done[0]:
            engine.step(batch)
        assert drafter.lookups[0].chances.shifts != expected_gain.START


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
