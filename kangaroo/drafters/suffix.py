"""Drafts what followed the longest suffix of the text that occurred before, by an automaton."""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kangaroo.drafters.base import Drafter, DrafterConfig, FromText
from kangaroo.engine.batch import Batch
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import CountOrZero, DraftSize, Positive

SEPARATOR = -1  # follows each stored answer; no token


class Match(ABC):
    """The longest suffix of a text that also occurs at another place of `tokens`: its length, and
    the place after it there; 0 and 0 if there is none."""

    tokens: list[int]
    length, place = 0, 0

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""

    def continuation(self, count: int, ends: Container[int] = ()) -> list[int]:
        """What followed the match: `count` tokens, or up to one of `ends`; none without a match.
        Where `tokens` end before that, the continuation repeats itself, so that a loop goes on."""
        tokens = self.tokens[self.place : self.place + count] if self.length else []
        if SEPARATOR in tokens:
            tokens, count = tokens[: tokens.index(SEPARATOR)], 0
        while 0 < len(tokens) < count:
            tokens += tokens[: count - len(tokens)]
        return tokens[: next((i for i, token in enumerate(tokens, 1) if token in ends), None)]


class SuffixAutomaton(Match):
    """The automaton of a text, to which a token is added in amortised constant time. The match is
    the longest suffix of the text that occurred before.

    A state stands for all strings that end at the same places. The state of the whole text ends
    only at its last token; its suffix link leads to the longest suffix that also ends elsewhere,
    without a search. Source: Blumer et al. 1985; for drafting, SAM-Decoding (arXiv 2411.10666)."""

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens: list[int] = []
        # by state: the next states by token, the suffix link, the longest string's length and end
        self.following: list[dict[int, int]] = [{}]
        self.link, self.lengths, self.ends = [-1], [0], [0]
        self._whole = 0  # the state of the whole text
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        following, link, lengths, ends = self.following, self.link, self.lengths, self.ends
        for token in tokens:
            self.tokens.append(token)
            end, state = len(self.tokens), self._whole
            self._whole = new = self._add_state({}, 0, end, end)
            while state >= 0 and token not in following[state]:
                following[state][token] = new
                state = link[state]
            if state >= 0:
                link[new] = longer = following[state][token]
                if lengths[longer] != lengths[state] + 1:
                    link[new] = self._split(state, token, longer)
            longest = link[new]
            self.length, self.place = lengths[longest], ends[longest] if longest else 0
            ends[longest] = end

    def _add_state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self.following.append(following)
        self.link.append(link)
        self.lengths.append(length)
        self.ends.append(end)
        return len(self.link) - 1

    def _split(self, state: int, token: int, longer: int) -> int:
        """A state for those strings of `longer` that end at more places: `state`'s with `token`."""
        following, link = self.following, self.link
        parts = following[longer].copy(), link[longer], self.lengths[state] + 1, self.ends[longer]
        link[longer] = shorter = self._add_state(*parts)
        while state >= 0 and following[state].get(token) == longer:
            following[state][token] = shorter
            state = link[state]
        return shorter


class StoredMatch(Match):
    """The match of a text in the automaton of stored answers, which does not grow."""

    def __init__(self, automaton: SuffixAutomaton):
        self.automaton, self.tokens = automaton, automaton.tokens
        self._state = 0  # of the match

    def extend(self, tokens: Sequence[int]) -> None:
        automaton, state, length = self.automaton, self._state, self.length
        for token in tokens:
            while state and token not in automaton.following[state]:
                state = automaton.link[state]
                length = automaton.lengths[state]
            state = automaton.following[state].get(token, 0)
            length = length + 1 if state else 0
        self._state, self.length, self.place = state, length, automaton.ends[state]


class TextMatches(NamedTuple):
    """A row's text, where its answer starts, and its matches: in itself, as far as that match has
    tokens, and perhaps in the stored answers."""

    text: list[int]
    answer_start: int
    matches: list[Match]


class AnswerStore:
    """The newest `size` tokens of the answers that a drafter has seen, and the matches of each row.
    An answer is stored when another text takes its row, or a new batch begins."""

    def __init__(self, size: int):
        self.size, self.tokens = size, list[int]()  # with a `SEPARATOR` after each answer
        self._automaton: SuffixAutomaton | None = None
        self._rows: dict[int, TextMatches] = {}

    def begin(self) -> None:
        """Start a new batch."""
        for row in list(self._rows):
            self._store(row)

    def matches(self, row: int, text: list[int]) -> Sequence[Match]:
        """The matches of a row's text: in itself, and, unless `size` is 0, in stored answers."""
        if row not in self._rows or self._rows[row].text is not text:  # another prompt took the row
            self._store(row)
            if self.size and self._automaton is None:
                self._automaton = SuffixAutomaton(self.tokens)
            stored = [] if self._automaton is None else [StoredMatch(self._automaton)]
            self._rows[row] = TextMatches(text, len(text) - 1, [SuffixAutomaton(), *stored])
        matches = self._rows[row].matches
        new_tokens = text[len(matches[0].tokens) :]
        for match in matches:
            match.extend(new_tokens)
        return matches

    def _store(self, row: int) -> None:
        ended = self._rows.pop(row, None)
        if ended is not None and self.size:
            self.tokens += [*ended.text[ended.answer_start :], SEPARATOR]
            self.tokens, self._automaton = self.tokens[-self.size :], None


@dataclass
class SuffixConfig(DrafterConfig):
    """A suffix automaton's chain, longer for a longer match (SAM-Decoding, arXiv 2411.10666, with
    the length of a draft as in SuffixDecoding, arXiv 2411.04975).

    Args:
        num_pred_tokens: the most draft tokens of a round.
        alpha: draft tokens for each token that matched.
        store_tokens: the number of newest tokens of earlier answers to search too, for serving and
            chat. With 0 a text's rounds do not depend on what was generated before.
    """

    name: str = "suffix"
    num_pred_tokens: DraftSize = 16
    alpha: Positive = 2.0
    store_tokens: CountOrZero = 0

    def build(self, lm: TargetModel) -> Drafter:
        return Suffix(self.num_pred_tokens, self.alpha, self.store_tokens)


class Suffix(FromText):
    """Drafts what followed the longest match in the text and the stored answers, up to an EOS."""

    def __init__(self, num_pred_tokens: int = 16, alpha: float = 2.0, store_tokens: int = 0):
        self.max_nodes, self.alpha = num_pred_tokens, alpha
        self.store = AnswerStore(store_tokens)

    def begin(self, batch: Batch) -> None:
        self.ends = batch.ends
        self.store.begin()

    def continuation(self, row: int, text: list[int]) -> list[int]:
        matches = self.store.matches(row, text)
        longest = max(matches, key=lambda match: match.length)  # of equals the one in the text
        count = min(self.max_nodes, int(self.alpha * longest.length))
        return longest.continuation(count, self.ends[row])
