"""What is drafted from the text alone: prompt lookup, a suffix automaton, Token Recycling."""

from types import SimpleNamespace

import pytest
import torch
from helpers import forward_logits, longest_earlier_match, random_prompts, tiny
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from kangaroo.drafters.base import FromText
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.drafters.suffix import SEPARATOR, Suffix, SuffixAutomaton
from kangaroo.drafters.token_recycling import RIGHT, TokenRecycling, static_tree, tree_chances
from kangaroo.engine.budget import Budget
from kangaroo.engine.costs import VerifyCosts
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.methods import generate
from kangaroo.evaluation.speed.speed import write_by_engine

SIZES = [(1, 1), (2, 10), (3, 10), (5, 3)]  # n-grams, draft tokens


def random_text(length: int, alphabet: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(alphabet, (length,), generator=generator).tolist()


def begun(drafter: FromText, *texts: list[int], eos: tuple[int, ...] = ()) -> SimpleNamespace:
    """Only what the drafter reads of a batch."""
    rows = len(texts)
    batch = SimpleNamespace(texts=[*texts], done=[False] * rows, ends=[frozenset(eos)] * rows)
    drafter.begin(batch)
    return batch


def by_transformers(text: list[int], ngram: int, count: int, eos: tuple[int, ...]) -> list[int]:
    ends = torch.tensor(eos) if eos else None
    generator = PromptLookupCandidateGenerator(ends, count, ngram, max_length=10**6)
    return generator.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()


@pytest.mark.parametrize("eos", [(), (0, 3)])
@pytest.mark.parametrize("alphabet", [4, 12, 60])
@pytest.mark.parametrize("ngram, count", SIZES)
def test_drafts_are_transformers_candidates(ngram, count, alphabet, eos):
    drafter, drafted = PromptLookup(ngram, count), 0
    batch = begun(drafter, [1], [2], eos=eos)
    for seed, length in enumerate((60, 25)):  # the second prompt takes the row of the first
        coming = random_text(length, alphabet, seed)
        batch.texts[1] = text = coming[: 1 + 7 * seed]
        for token in coming[len(text) :]:
            continuation = drafter.continuation(1, text)
            assert continuation == by_transformers(text, ngram, count, eos)
            drafted += len(continuation)
            text.append(token)
    assert drafted > 10


@pytest.mark.parametrize("ngram", [2, 3])
def test_as_many_rounds_as_transformers_generate_takes(ngram):
    lm = tiny("llama", eos_token_id=5)
    engine = Engine(lm, PromptLookup(ngram, 10))
    speculation = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": ngram}
    accepted = 0
    for prompt in random_prompts(40, 7, 150):
        prompt = prompt + prompt[: len(prompt) // 2]
        ours = write_by_engine(engine, prompt, 60)
        # theirs drafts before its prefill, ours after: so it begins after the token of ours
        other = generate(lm, [*prompt, ours.tokens[0]], 59, **speculation)
        assert ours.tokens[1:] == other.tokens
        written = [len(step.tokens) for step in ours.steps[1:]]
        assert written == [len(step.tokens) for step in other.steps]
        accepted += 59 - len(written)
    assert accepted > 10


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8, 40])
def test_the_longest_end_that_stood_before_is_known_after_every_token(alphabet):
    automaton, matched = SuffixAutomaton(), 0
    text = random_text(120, alphabet, seed=alphabet)
    for end, token in enumerate(text, start=1):
        automaton.extend([token])
        assert automaton.tokens == text[:end]
        length, place = automaton.match
        expected, places = longest_earlier_match(text[:end])
        assert length == expected and place in places
        matched += length > 0
    assert matched > 60


@pytest.mark.parametrize("alphabet", [1, 2, 8])
def test_a_continuation_is_what_followed_and_goes_on_with_itself(alphabet):
    text = random_text(60, alphabet, seed=3)
    for end in range(2, len(text)):
        automaton = SuffixAutomaton(text[:end])
        length, place = automaton.match
        drafted = automaton.continuation(10)
        assert len(drafted) == (10 if length else 0)
        longer = text[:end] + drafted
        assert drafted == longer[place : place + len(drafted)]


def test_the_last_of_several_places_counts():
    assert SuffixAutomaton([1, 2, 7, 1, 2, 8, 1, 2]).continuation(3) == [8, 1, 2]


def test_a_draft_is_as_long_as_the_match_allows_and_ends_with_an_eos():
    text = [1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 4]
    for alpha, limit, count in ((1.0, 9, 3), (2.0, 9, 6), (2.0, 4, 4), (0.3, 9, 0)):
        drafter = Suffix(limit, alpha)
        begun(drafter, text)
        assert drafter.continuation(0, text) == [5, 6, 7, 9, 2, 3][:count]
    begun(drafter := Suffix(9, 2.0), text, eos=(6,))
    assert drafter.continuation(0, text) == [5, 6]


def test_earlier_answers_are_searched_and_the_longer_match_wins():
    drafter = Suffix(5, 1.0, store_tokens=100)
    text = [8, 3]
    batch = begun(drafter, text)
    assert drafter.continuation(0, text) == []
    text += [4, 5, 6, 7]
    batch.texts[0] = other = [4, 9, 3, 4]  # the prompt has 4 9; the answer before has 3 4 5 6 7
    assert drafter.continuation(0, other) == [5, 6]
    other += [9]
    assert drafter.continuation(0, other) == [3, 4]
    begun(drafter, again := [5, 6])
    assert drafter.continuation(0, again) == [7]  # no further, since the answer ends here
    assert drafter.store.tokens == [3, 4, 5, 6, 7, SEPARATOR, 4, 9, SEPARATOR]


@pytest.mark.parametrize("limit, kept", [(8, [10, 11, 12, SEPARATOR]), (0, [])])
def test_a_store_keeps_the_newest_answers_and_one_of_no_tokens_none(limit, kept):
    drafter = Suffix(5, 1.0, limit)
    for first in (1, 5, 9):
        batch = begun(drafter, [first])
        drafter.continuation(0, batch.texts[0])
        batch.texts[0] += range(first + 1, first + 4)
    begun(drafter, [1])
    assert drafter.store.tokens[-4:] == kept and len(drafter.store.tokens) <= limit


def batch_of(drafter: TokenRecycling, *texts: list[int], costs: VerifyCosts | None = None):
    budget = Budget((costs or VerifyCosts([1, 2], [1.0, 1.0])).curve, always=costs is None)
    batch = SimpleNamespace(texts=list(texts), size=len(texts), active=len(texts), budget=budget)
    batch.likeliest, batch.verified = 0, [[] for _ in texts]
    drafter.begin(batch)
    return batch


def test_a_tree_follows_the_matrix_by_rank_and_leaves_out_what_nothing_is_known_of():
    drafter = TokenRecycling(nodes=4)
    batch = batch_of(drafter, [1, 2, 3, 1, 4, 1])
    assert static_tree(4) == [(0,), (1,), (0, 0), (0, 0, 0)]
    # 1 was followed by 2, and then by 4, whose successor is 1
    assert drafter.tree_of(batch, 0) == ([4, 2, 1, 4], [0, 0, 1, 3])
    batch.verified[0] += [(1, [7, 8, 9]), (8, [1])]
    assert drafter.tree_of(batch, 0) == ([7, 8], [0, 0])  # nothing is known of 7
    assert not batch.verified[0]
    batch.texts[0] = [6, 1]
    assert drafter.tree_of(batch, 0) == ([], [])  # another prompt has taken the row


def test_the_static_tree_begins_with_the_likeliest_tokens():
    assert tree_chances(3) == pytest.approx([RIGHT[0], RIGHT[0] ** 2, RIGHT[1]])


def test_rows_of_a_batch_draft_what_pays(measured_budget):
    texts, nodes = [[1, 2, 3, 1, 2, 3]] * 2, []
    for node in (0.0, 0.05, 1.0):
        drafter = TokenRecycling(nodes=3)
        batch = batch_of(drafter, *texts, costs=VerifyCosts([2, 4], [1.0, 1.0 + 2 * node]))
        nodes.append(len(drafter.tree_of(batch, 1)[0]))
    assert nodes == [2, 1, 0]


@pytest.mark.parametrize("compiled", [False, True])
def test_every_verified_node_says_the_targets_likeliest_tokens(compiled):
    lm = tiny()
    lm = lm.compile_for_decoding() if compiled else lm
    engine = Engine(lm, TokenRecycling(9), always_drafts=True)
    batch = engine.open(2, 80, Sampling(temperature=1.0))
    for row, prompt in enumerate(random_prompts(5, 30)):
        engine.admit(batch, row, Request(prompt * 2, 12))
    nodes = 0
    for _ in range(6):
        trees = [engine.drafter.tree_of(batch, row) for row in range(2)]
        texts = [list(text) for text in batch.texts]
        engine.step(batch)
        for text, (tokens, parents), verified in zip(texts, trees, batch.verified, strict=True):
            paths = [text]
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*paths[parent], token])
            assert [token for token, _ in verified] == [path[-1] for path in paths]
            for path, (_, likeliest) in zip(paths, verified, strict=True):
                expected = forward_logits(lm, path)[-1].topk(len(RIGHT)).indices
                assert likeliest == expected.tolist()
            nodes += len(tokens)
    assert nodes > 10
