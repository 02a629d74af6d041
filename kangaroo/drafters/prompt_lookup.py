"""Prompt lookup: drafts what followed where the text's last tokens occurred before."""

from dataclasses import dataclass, field
from itertools import takewhile

from kangaroo.drafters.base import Drafter, DrafterConfig, FromText, RowStates
from kangaroo.engine.batch import Batch
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, DraftSize


@dataclass
class PromptLookupConfig(DrafterConfig):
    """Prompt lookup decoding (Saxena 2023).

    Args:
        max_matching_ngram_size: the most tokens at the end of the text to look up; if these occur
            nowhere else, fewer are looked up, down to a single one.
        num_pred_tokens: the most draft tokens of a round.
    """

    name: str = "prompt_lookup"
    max_matching_ngram_size: Count = 3
    num_pred_tokens: DraftSize = 10

    def build(self, lm: TargetModel) -> Drafter:
        return PromptLookup(self.max_matching_ngram_size, self.num_pred_tokens)


class PromptLookup(FromText):
    """Drafts the tokens of transformers' `PromptLookupCandidateGenerator`: the first occurrence of
    the longest n-gram counts, and a draft ends before an EOS."""

    def __init__(self, max_ngram: int = 3, num_pred_tokens: int = 10, min_ngram: int = 1):
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.max_nodes = num_pred_tokens

    def begin(self, batch: Batch) -> None:
        self.eos_ids = batch.ends
        self.ngrams = RowStates(lambda row, text: Ngrams(text, self.max_ngram))

    def continuation(self, row: int, text: list[int]) -> list[int]:
        _, end = self.match(row, text)
        return self.before_eos(row, text[end : end + self.max_nodes])

    def match(self, row: int, text: list[int]) -> tuple[int, int]:
        """The size of the longest n-gram at the text's end that occurred before, and where it first
        ended; 0 and the text's end if there is none."""
        ends = self.ngrams.get(row, text).find_ends()
        for n in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            end = ends.get(tuple(text[-n:]))
            if end is not None:
                return n, end
        return 0, len(text)

    def before_eos(self, row: int, tokens: list[int]) -> list[int]:
        """The tokens up to one that ends the row's text."""
        return list(takewhile(lambda token: token not in self.eos_ids[row], tokens))


@dataclass
class Ngrams:
    """The n-grams of a growing text, for all n up to `max_ngram`."""

    text: list[int]
    max_ngram: int
    n_read: int = 0
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)

    def find_ends(self) -> dict[tuple[int, ...], int]:
        """Where each n-gram first ends; not at the text's end, where nothing follows yet."""
        for end in range(self.n_read + 1, len(self.text)):
            for n in range(1, min(self.max_ngram, end) + 1):
                self.ends.setdefault(tuple(self.text[end - n : end]), end)
            self.n_read = end
        return self.ends
