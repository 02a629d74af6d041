"""What the hybrid drafts, in every round, from the text alone; and what it refuses."""

from __future__ import annotations

import pytest
from cases import CHUNK, NEW_TOKENS, PROMPTS, SAMPLINGS, Case, case_of, choices_without_cache
from helpers import adapter_for, admit_text, longest_earlier_match, tiny
from syncs import Syncs

from kangaroo.cpu.drafting import HybridDrafting
from kangaroo.cpu.stepper import CpuStepper
from kangaroo.drafters import expected_gain
from kangaroo.drafters.expected_gain import Costs, Sources, best_tree, drafting_pays
from kangaroo.drafters.hybrid import Hybrid, Lookup
from kangaroo.engine.cache import BUCKET
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.utils.errors import ConfigError

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


def test_where_the_lookup_is_nearly_sure_nothing_is_drafted(case, sure, monkeypatch):
    drafter = Hybrid(case.lm, case.adapter, costs=COSTS, nodes=NODES)
    engine = Engine(case.lm, drafter)
    batch = engine.open(1, 60, Sampling())
    admit_text(engine, batch, 0, [1, 2, 3, 4, 1, 2, 3])

    def fail(*_):
        raise AssertionError("it drafted")

    monkeypatch.setattr(drafter, "tokens", fail)
    (record,) = engine.step(batch)
    assert record.drafted == NODES


def test_a_native_draft_computes_the_states_of_the_lookup_with_those_of_the_pending_token():
    """So that a chain that says what the lookup says passes the shallow layers once."""
    lm = tiny().compile_for_decoding()
    drafter = Hybrid(lm, adapter_for(lm), 1, costs=COSTS, nodes=NODES)
    engine = Engine(lm, drafter)
    batch = engine.open(1, 60, Sampling())
    admit_text(engine, batch, 0, [1, 2, 3, 4, 5, 3])
    assert isinstance(engine.stepper, CpuStepper)
    rounds = engine.stepper.buffers
    engine.stepper._begin([0])
    engine.stepper.drafting.draft(rounds, batch, [0])
    lookup = drafter.looked_up(batch, 0).lookup
    parents, tokens = rounds.parent[0].tolist(), rounds.token[0].tolist()
    node, found = 0, 0
    for wanted in lookup:
        below = [i for i in range(1, rounds.count[0]) if (parents[i], tokens[i]) == (node, wanted)]
        if not below:
            break
        (node,) = below
        assert rounds.has_state[0, node]
        found += 1
    assert found


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


def test_the_rejection_rule_is_refused_since_it_needs_chains(case):
    drafter = Hybrid(case.lm, case.adapter, costs=COSTS, nodes=NODES)
    sampling = Sampling(temperature=0.8, rule=Rule.rejection)
    with pytest.raises(ConfigError, match=r"sampling\.rule=rejection needs a drafter of chains"):
        Engine(case.lm, drafter).generate(PROMPTS[:1], 5, sampling)


@pytest.mark.parametrize("nodes, steps", [(15, 6), (2, 6)])
def test_a_row_has_slots_for_all_places_that_a_native_draft_may_take(nodes, steps):
    """Lookup, chain and further choices together take more of them than the tree has nodes."""
    lm = tiny().compile_for_decoding()
    drafter = Hybrid(lm, adapter_for(lm), steps, nodes=nodes)
    engine = Engine(lm, drafter)
    longest = 2 * BUCKET - engine.spare_slots  # so that no slot is left over
    batch = engine.open(2, longest, Sampling())
    assert batch.n_slots == 2 * BUCKET
    assert (
        longest - 2 + HybridDrafting(drafter).nodes < batch.n_slots
    )  # from the last pending token on


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
