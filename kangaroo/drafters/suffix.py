"""Drafts what followed the longest end of a text where it stood before; the automaton that knows.

Here too: how far texts agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kangaroo.drafters.base import DrafterConfig, FromText
from kangaroo.engine.batch import Batch
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import CountOrZero, DraftSize, Positive

SEPARATOR = -1  # between the answers of a store; no token


class Match(NamedTuple):
    """Of the end of a text: how many tokens stand in an automaton, the place after them, and the
    automaton's state."""

    length: int = 0
    place: int = 0
    state: int = 0


class SuffixAutomaton:
    """Of the tokens that were added so far; another one takes amortised constant time.

    A state stands for all strings that end at the same places. The state of the whole text ends at
    its last token alone, and its suffix link leads to the longest suffix that ends elsewhere too.
    So that suffix is known without a search.

    Source: Blumer et al. 1985; for drafting, SAM-Decoding (arXiv 2411.10666).

    Attributes:
        tokens: the text.
        longest: the longest end of the text that stood before, and where.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens: list[int] = []
        # of each state: where a token leads, its suffix link, its longest string, and where it
        # ended last as the longest suffix that had stood before
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]
        self._whole = 0  # the state of the whole text
        self.longest = Match()
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        for token in tokens:
            self._append(token)

    @property
    def match(self) -> tuple[int, int]:
        """How many tokens at the end of the text stood there before, and the place after them.

        Where none did, both are 0.
        """
        return self.longest[:2]

    def advance(self, match: Match, token: int) -> Match:
        """The longest end of what matched and a token after it that stands in the text."""
        length, _, state = match
        while length <= self._length[self._link[state]] and state:  # which has been split since
            state = self._link[state]
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return Match()
        state = self._next[state][token]
        return Match(length + 1, self._end[state], state)

    def continuation(self, count: int, match: Match | None = None) -> list[int]:
        """What followed the place of a match, `count` tokens; none where none matched.

        Where that place is so near that the text ends before, it goes on with what was just read,
        so that a loop is drafted as a loop.

        Args:
            match: by default `longest`.
        """
        length, place, _ = match or self.longest
        if not length or place == len(self.tokens):
            return []
        tokens = self.tokens[place : place + count]
        while len(tokens) < count:
            tokens += tokens[: count - len(tokens)]
        return tokens

    def _append(self, token: int) -> None:
        follows, link, lengths, ends = self._next, self._link, self._length, self._end
        self.tokens.append(token)
        end = len(self.tokens)
        new = len(link)
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
        self.longest = Match(lengths[longest], ends[longest] if longest else 0, longest)
        ends[longest] = end

    def _split(self, state: int, token: int, longer: int) -> int:
        """A state for those strings of `longer` that come by `token` after `state`'s: they end at
        more places."""
        follows, link = self._next, self._link
        shorter = len(link)
        follows.append(dict(follows[longer]))
        link.append(link[longer])
        self._length.append(self._length[state] + 1)
        self._end.append(self._end[longer])
        link[longer] = shorter
        while state >= 0 and follows[state].get(token) == longer:
            follows[state][token] = shorter
            state = link[state]
        return shorter


def shared(first: Sequence[int], text: Sequence[int]) -> int:
    """How many tokens two lists have in common from the first on."""
    pairs = enumerate(zip(first, text, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(text)))


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

    def build(self, lm: TargetModel) -> Suffix:
        return Suffix(self.num_pred_tokens, self.alpha, self.store_tokens)


class Suffix(FromText):
    """Drafts what followed the longer of two matches: in the text itself, or in earlier answers.

    An answer is stored when another text takes its row, or another batch begins.
    """

    def __init__(self, num_pred_tokens: int = 16, alpha: float = 2.0, store_tokens: int = 0):
        self.max_nodes, self.alpha, self.store_tokens = num_pred_tokens, alpha, store_tokens
        self.store = SuffixAutomaton()
        self.rows: dict[int, SuffixRow] = {}

    def begin(self, batch: Batch) -> None:
        for row in self.rows.values():
            self._keep(row)
        self.batch, self.rows = batch, {}

    def continuation(self, row: int, text: list[int]) -> list[int]:
        if self.batch.done[row]:
            return []
        committed = self.batch.texts[row]
        if row not in self.rows or self.rows[row].text is not committed:
            if row in self.rows:
                self._keep(self.rows[row])
            self.rows[row] = SuffixRow(committed, self.store)
        automaton, match = self.rows[row].find(text[len(committed) :])
        count = min(self.max_nodes, int(self.alpha * match.length))
        drafted = automaton.continuation(count, match)
        for i, token in enumerate(drafted):
            if token == SEPARATOR or token in self.batch.ends[row]:
                return drafted[: i + (token != SEPARATOR)]
        return drafted

    def _keep(self, row: SuffixRow) -> None:
        """Store a text's answer."""
        if not self.store_tokens:
            return
        self.store.extend([*row.text[row.begins :], SEPARATOR])
        if len(self.store.tokens) > self.store_tokens:  # an automaton forgets nothing, so a new one
            self.store = SuffixAutomaton(self.store.tokens[-(self.store_tokens // 2) :])


class SuffixRow:
    """A growing text, and what stood before in it and in a store.

    Args:
        text: of a prompt and the answer's first token, or a few.
        store: of earlier answers, the same for as long as the text grows.
    """

    def __init__(self, text: list[int], store: SuffixAutomaton):
        self.text, self.begins, self.store = text, len(text) - 1, store
        self.automaton, self.stored = SuffixAutomaton(), Match()

    def find(self, further: Sequence[int]) -> tuple[SuffixAutomaton, Match]:
        """The longer match of the text and further tokens, which are not kept, and of what."""
        new = self.text[len(self.automaton.tokens) :]
        self.automaton.extend(new)
        for token in new:
            self.stored = self.store.advance(self.stored, token)
        within, stored = self.automaton.longest, self.stored
        for token in further:
            within = self.automaton.advance(within, token)
            stored = self.store.advance(stored, token)
        own = within.length >= stored.length
        return (self.automaton, within) if own else (self.store, stored)
