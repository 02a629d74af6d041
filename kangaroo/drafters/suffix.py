"""Where the longest end of a growing text stood before: a suffix automaton; how far texts agree."""

from __future__ import annotations

from collections.abc import Sequence


class SuffixAutomaton:
    """Of the tokens that were added so far; another one takes amortised constant time.

    A state stands for all strings that end at the same places. The state of the whole text ends at
    its last token alone, and its suffix link leads to the longest suffix that ends elsewhere too.
    So that suffix is known without a search.

    Source: Blumer et al. 1985; for drafting, SAM-Decoding (arXiv 2411.10666).

    Attributes:
        tokens: the text.
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
        self._match = 0, 0
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
        return self._match

    def continuation(self, count: int) -> list[int]:
        """What followed the earlier place of the match, `count` tokens; none where none matched.

        Where that place is so near that the text ends before, it goes on with what was just read,
        so that a loop is drafted as a loop.
        """
        length, place = self._match
        if not length:
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
        self._match = lengths[longest], ends[longest] if longest else 0
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
