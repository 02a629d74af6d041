"""Drafts what followed the longest end of a text where it stood before, by an automaton."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from kangaroo.drafters.base import DrafterConfig, FromText
from kangaroo.engine.batch import Batch
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import CountOrZero, DraftSize, Positive

SEPARATOR = -1  # between stored answers; no token


class SuffixAutomaton:
    """Of the tokens that were added so far; another one takes amortised constant time.

    A state stands for all strings that end at the same places. The state of the whole text ends at
    its last token alone, and its suffix link leads to the longest suffix that ends elsewhere too.
    So that suffix is known without a search.

    Source: Blumer et al. 1985; for drafting, SAM-Decoding (arXiv 2411.10666).

    Attributes:
        tokens: the text.
        match: how many tokens at its end stood there before, and the place after them; 0 and 0
            where none did.
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
        self.match = 0, 0
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        for token in tokens:
            self._append(token)

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
        while len(tokens) < count:
            tokens += tokens[: count - len(tokens)]
        return tokens[: next((i for i, token in enumerate(tokens, 1) if token in ends), None)]

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
        self._end.append(self._end[longer])
        link[longer] = shorter
        while state >= 0 and follows[state].get(token) == longer:
            follows[state][token] = shorter
            state = link[state]
        return shorter


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
    """Drafts what followed the longest match in the text itself and in the stored answers, up to
    what ends the text. An answer is stored when another text takes its row, or a batch begins.
    """

    def __init__(self, num_pred_tokens: int = 16, alpha: float = 2.0, store_tokens: int = 0):
        self.max_nodes, self.alpha, self.store_tokens = num_pred_tokens, alpha, store_tokens
        self.store: list[int] = []
        self.rows: dict[int, SuffixRow] = {}

    def begin(self, batch: Batch) -> None:
        for row in self.rows.values():
            self._keep(row)
        self.batch, self.rows = batch, {}

    def continuation(self, row: int, text: list[int]) -> list[int]:
        if self.batch.done[row]:
            return []
        if row not in self.rows or self.rows[row].text is not text:  # another prompt took the row
            if row in self.rows:
                self._keep(self.rows[row])
            self.rows[row] = SuffixRow(text, len(text) - 1, SuffixAutomaton(self.store))
        automaton = self.rows[row].grown()
        count = min(self.max_nodes, int(self.alpha * automaton.match[0]))
        tokens = automaton.continuation(count, {SEPARATOR, *self.batch.ends[row]})
        return tokens[:-1] if tokens[-1:] == [SEPARATOR] else tokens

    def _keep(self, row: SuffixRow) -> None:
        """Store a text's answer."""
        if self.store_tokens:
            self.store += [*row.text[row.begins :], SEPARATOR]
            del self.store[: -self.store_tokens]


@dataclass
class SuffixRow:
    """A growing text, where its answer begins, and what stood before in both the store and it."""

    text: list[int]
    begins: int
    automaton: SuffixAutomaton

    def __post_init__(self) -> None:
        self.stored = len(self.automaton.tokens)

    def grown(self) -> SuffixAutomaton:
        """The automaton with all of the text."""
        self.automaton.extend(self.text[len(self.automaton.tokens) - self.stored :])
        return self.automaton
