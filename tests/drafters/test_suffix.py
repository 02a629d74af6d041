"""The suffix automaton against a search through the whole text, and what is drafted by it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import longest_earlier_match

from kangaroo.drafters.suffix import Suffix, SuffixAutomaton


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
