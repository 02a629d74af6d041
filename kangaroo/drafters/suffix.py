"""Suffix: drafts what followed the longest suffix of the text that occurred before."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from kangaroo.drafters.base import Drafter, DrafterConfig, FromText, RowStates
from kangaroo.engine.batch import Batch
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import DraftSize, Positive


class SuffixAutomaton:
    """The automaton of a text, to which a token is added in amortised constant time. The match is
    the longest suffix of the text that occurred before.

    A state stands for all strings that end at the same places. The state of the whole text ends
    only at its last token, and its suffix link leads, without a search, to the longest suffix that
    also ends elsewhere. Sources: Blumer et al. 1985; SAM-Decoding (arXiv 2411.10666)."""

    length = 0  # of the match; 0 without a match
    place = 0  # where its earlier occurrence ends

    def __init__(self) -> None:
        self.tokens: list[int] = []
        # by state: the next states by token, the suffix link, the longest string's length and end
        self.following: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.lengths = [0]
        self.ends = [0]
        self._whole = 0  # the state of the whole text

    def continuation(self, count: int, ends: Container[int] = ()) -> list[int]:
        """What followed the match: `count` tokens, or those up to one of `ends`; none without a
        match. If the text ends first, the continuation is repeated, so that a loop goes on."""
        tokens = self.tokens[self.place : self.place + count] if self.length else []
        while 0 < len(tokens) < count:
            tokens += tokens[: count - len(tokens)]
        return tokens[: next((i for i, token in enumerate(tokens, 1) if token in ends), None)]

    def follow(self, text: Sequence[int]) -> None:
        """Append the tokens that a text has beyond those of this one."""
        following = self.following
        link = self.link
        lengths = self.lengths
        for token in text[len(self.tokens) :]:
            self.tokens.append(token)
            end = len(self.tokens)
            state = self._whole
            self._whole = new = self._add_state({}, link=0, length=end, end=end)
            while state >= 0 and token not in following[state]:
                following[state][token] = new
                state = link[state]
            if state >= 0:
                link[new] = longer = following[state][token]
                if lengths[longer] != lengths[state] + 1:
                    link[new] = self._split(state, token, longer)
            longest = link[new]
            self.length = lengths[longest]
            self.place = self.ends[longest] if longest else 0
            self.ends[longest] = end

    def _add_state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self.following.append(following)
        self.link.append(link)
        self.lengths.append(length)
        self.ends.append(end)
        return len(self.link) - 1

    def _split(self, state: int, token: int, longer: int) -> int:
        """A state for those strings of `longer` that end at more places: `state`'s with `token`."""
        following = self.following
        link = self.link
        shorter = self._add_state(
            following[longer].copy(),
            link=link[longer],
            length=self.lengths[state] + 1,
            end=self.ends[longer],
        )
        link[longer] = shorter
        while state >= 0 and following[state].get(token) == longer:
            following[state][token] = shorter
            state = link[state]
        return shorter


@dataclass
class SuffixConfig(DrafterConfig):
    """A suffix automaton's chain, which is longer for a longer match (SAM-Decoding, arXiv
    2411.10666, with the length of drafts as in SuffixDecoding, arXiv 2411.04975).

    Args:
        num_pred_tokens: the most draft tokens of a round.
        alpha: draft tokens for each token that matched.
    """

    name: str = "suffix"
    num_pred_tokens: DraftSize = 16
    alpha: Positive = 2.0

    def build(self, lm: TargetModel) -> Drafter:
        return Suffix(self.num_pred_tokens, self.alpha)


class Suffix(FromText):
    """Drafts what followed the longest match in the text, up to an EOS."""

    def __init__(self, num_pred_tokens: int = 16, alpha: float = 2.0):
        self.max_nodes = num_pred_tokens
        self.alpha = alpha

    def begin(self, batch: Batch) -> None:
        self.ends = batch.ends
        self.automata = RowStates(lambda row, text: SuffixAutomaton())

    def continuation(self, row: int, text: list[int]) -> list[int]:
        automaton = self.automata.get(row, text)
        automaton.follow(text)
        count = min(self.max_nodes, int(self.alpha * automaton.length))
        return automaton.continuation(count, self.ends[row])
