"""The suffix automaton against a search through the whole text, and what is drafted by it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import longest_earlier_match

from kangaroo.drafters.suffix import SEPARATOR, Match, Suffix, SuffixAutomaton


def random_text(length: int, alphabet: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(alphabet, (length,), generator=generator).tolist()


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


@pytest.mark.parametrize("alphabet", [2, 4, 12])
def test_another_text_is_matched_while_both_grow(alphabet):
    stored, read = random_text(150, alphabet, seed=1), random_text(150, alphabet, seed=2)
    automaton, match, lengths = SuffixAutomaton(), Match(), set()
    for end in range(1, len(read) + 1):
        before = stored[: end - 1]
        match = automaton.advance(match, read[end - 1])
        places = {
            n: [i for i in range(n, len(before) + 1) if before[i - n : i] == read[end - n : end]]
            for n in range(1, end + 1)
        }
        longest = max((n for n, at in places.items() if at), default=0)
        # what the text has learnt since is not in a match that began before
        assert match.length <= longest and (not match.length or match.place in places[match.length])
        fresh = Match()
        for token in read[:end]:
            fresh = automaton.advance(fresh, token)
        assert fresh.length == longest
        lengths.add(match.length)
        automaton.extend(stored[end - 1 : end])
    assert len(lengths) > 1


def begun(drafter: Suffix, *texts: list[int], eos: tuple[int, ...] = ()) -> SimpleNamespace:
    """Only what the drafter reads of a batch."""
    rows = len(texts)
    batch = SimpleNamespace(texts=[*texts], done=[False] * rows, ends=[frozenset(eos)] * rows)
    drafter.begin(batch)
    return batch


def test_a_draft_is_as_long_as_the_match_allows_and_ends_with_an_eos():
    text = [1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 4]
    for alpha, limit, count in ((1.0, 9, 3), (2.0, 9, 6), (2.0, 4, 4), (0.3, 9, 0)):
        drafter = Suffix(limit, alpha)
        begun(drafter, text)
        assert drafter.continuation(0, text) == [5, 6, 7, 9, 2, 3][:count]
    begun(drafter := Suffix(9, 2.0), text, eos=(6,))
    assert drafter.continuation(0, text) == [5, 6]
    assert drafter.continuation(0, [*text, 5]) == [6]  # a draft of another's goes on


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


def test_a_store_keeps_the_newest_answers_and_one_of_no_tokens_none():
    for limit, kept in ((8, [10, 11, 12, SEPARATOR]), (0, [])):
        drafter = Suffix(5, 1.0, limit)
        for first in (1, 5, 9):
            batch = begun(drafter, [first])
            drafter.continuation(0, batch.texts[0])
            batch.texts[0] += range(first + 1, first + 4)
        begun(drafter, [1])
        assert drafter.store.tokens[-4:] == kept
        assert len(drafter.store.tokens) <= limit
