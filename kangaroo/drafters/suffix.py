"""Drafts what followed the longest end of a text where it stood before, by an automaton."""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kangaroo.drafters.base import Drafter, DrafterConfig, FromText
from kangaroo.engine.batch import Batch
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import CountOrZero, DraftSize, Positive

SEPARATOR = -1  # between stored answers; no token


class Match(ABC):
    """How many tokens at a text's end stand in others, and the place after them there (`match`); 0
    and 0 where none do."""

    tokens: list[int]
    match: tuple[int, int]

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the text."""

    def continuation(self, count: int, ends: Container[int] = ()) -> list[int]:
        """What followed the place of the match, `count` tokens or up to one of `ends`; none where
        none matched.

        Where that place is so near that the text ends before, it goes on with what was just read,
        so that a loop is drafted as a loop.
        """
        length, place = self.match
        if not length:
            return []
        tokens = self.tokens[place : place + count]
        if SEPARATOR in tokens:
            tokens, count = tokens[: tokens.index(SEPARATOR)], 0
        while len(tokens) < count:
            tokens += tokens[: count - len(tokens)]
        return tokens[: next((i for i, token in enumerate(tokens, 1) if token in ends), None)]


class SuffixAutomaton(Match):
    """Of the tokens that were added so far; another one takes amortised constant time. `match` is
    of the text itself, where its end stood before.

    A state stands for all strings that end at the same places. The state of the whole text ends at
    its last token alone, and its suffix link leads to the longest suffix that ends elsewhere too.
    So that suffix is known without a search.
    Source: Blumer et al. 1985; for drafting, SAM-Decoding (arXiv 2411.10666).
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens: list[int] = []
        # of each state: where a token leads, its suffix link, its longest string, and where it
        # ended last as the longest suffix that had stood before
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self.ends = [-1], [0], [0]
        self._whole = 0  # the state of the whole text
        self.match = 0, 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        follows, link, lengths, ends = self._next, self._link, self._length, self.ends
        self.tokens.append(token)
        end, new = len(self.tokens), len(link)
        follows.append({})
        link.append(0)
        lengths.append(end)
        ends.append(end)
        state = self._whole
        while state >= 0 and token not in follows[state]:
            follows[state][token] = new
            state = link[state]
        if state >= 0:
            longer = follows[state][token]
            link[new] = longer
            if lengths[longer] != lengths[state] + 1:
                link[new] = self._split(state, token, longer)
        self._whole = new
        longest = link[new]
        self.match = lengths[longest], ends[longest] if longest else 0
        ends[longest] = end

    def _split(self, state: int, token: int, longer: int) -> int:
        """A state for those strings of `longer` that come by `token` after `state`'s: they end at
        more places."""
        follows, link = self._next, self._link
        shorter = len(link)
        follows.append(dict(follows[longer]))
        link.append(link[longer])
        self._length.append(self._length[state] + 1)
        self.ends.append(self.ends[longer])
        link[longer] = shorter
        while state >= 0 and follows[state].get(token) == longer:
            follows[state][token] = shorter
            state = link[state]
        return shorter

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Of another text, whose longest end that stands here has this state and length: the same
        of it with one token more. A state's strings end before `ends[state]`."""
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return 0, 0
        return self._next[state][token], length + 1


class StoredMatch(Match):
    """Of the end of a text that grows elsewhere, in an automaton that does not grow."""

    def __init__(self, automaton: SuffixAutomaton):
        self.automaton, self.tokens = automaton, automaton.tokens
        self.match, self._state = (0, 0), 0

    def extend(self, tokens: Sequence[int]) -> None:
        length, _ = self.match
        for token in tokens:
            self._state, length = self.automaton.follow(self._state, length, token)
        self.match = length, self.automaton.ends[self._state]


class TextMatches(NamedTuple):
    """Of a text that grows elsewhere, and whose answer `begins` there: in itself, which has read as
    far as it has tokens, and perhaps in a store."""

    text: list[int]
    begins: int
    parts: list[Match]


class AnswerStore:
    """The newest `size` tokens of the answers that a drafter has seen, with 0 none; and of each
    row what its text matches. An answer is stored when another text takes its row, or a batch
    begins.

    Attributes:
        tokens: the answers, a `SEPARATOR` after each.
    """

    def __init__(self, size: int):
        self.size, self.tokens = size, list[int]()
        self._automaton: SuffixAutomaton | None = None
        self._rows: dict[int, TextMatches] = {}

    def begin(self) -> None:
        """A new batch."""
        for row in list(self._rows):
            self._store(row)

    def matches(self, row: int, text: list[int]) -> Sequence[Match]:
        """Of the end of a row's text: in itself, and in what is stored, if that is wanted."""
        if row not in self._rows or self._rows[row].text is not text:  # another prompt took the row
            self._store(row)
            if self.size and self._automaton is None:
                self._automaton = SuffixAutomaton(self.tokens)
            stored = [] if self._automaton is None else [StoredMatch(self._automaton)]
            self._rows[row] = TextMatches(text, len(text) - 1, [SuffixAutomaton(), *stored])
        parts = self._rows[row].parts
        new = text[len(parts[0].tokens) :]
        for part in parts:
            part.extend(new)
        return parts

    def _store(self, row: int) -> None:
        of_row = self._rows.pop(row, None)
        if of_row is not None and self.size:
            self.tokens += [*of_row.text[of_row.begins :], SEPARATOR]
            self.tokens, self._automaton = self.tokens[-self.size :], None


@dataclass
class SuffixConfig(DrafterConfig):
    """A suffix automaton's chain, longer the longer the match (SAM-Decoding, arXiv 2411.10666, with
    the length of a draft as in SuffixDecoding, arXiv 2411.04975).

    Args:
        num_pred_tokens: at most this many draft tokens a round.
        alpha: draft tokens for each token that matched.
        store_tokens: so many tokens of the answers that this drafter has seen are searched too, the
            newest, for whoever serves or chats. With 0 only a text itself is, so that it takes the
            same rounds whatever was written before.
    """

    name: str = "suffix"
    num_pred_tokens: DraftSize = 16
    alpha: Positive = 2.0
    store_tokens: CountOrZero = 0

    def build(self, lm: TargetModel) -> Drafter:
        return Suffix(self.num_pred_tokens, self.alpha, self.store_tokens)


class Suffix(FromText):
    """Drafts what followed the longest match in the text itself and in the stored answers, up to
    what ends the text."""

    def __init__(self, num_pred_tokens: int = 16, alpha: float = 2.0, store_tokens: int = 0):
        self.max_nodes, self.alpha = num_pred_tokens, alpha
        self.store = AnswerStore(store_tokens)

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        self.store.begin()

    def continuation(self, row: int, text: list[int]) -> list[int]:
        matches = self.store.matches(row, text)
        longest = max(matches, key=lambda part: part.match[0])  # of equals the text's
        count = min(self.max_nodes, int(self.alpha * longest.match[0]))
        return longest.continuation(count, self.batch.ends[row])
