"""Prompt lookup: what followed the text's last tokens where they stood before follows again."""

from dataclasses import dataclass

from kangaroo.drafters.base import Drafter, DrafterConfig, FromText, RowStates
from kangaroo.engine.batch import Batch
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, DraftSize


@dataclass
class PromptLookupConfig(DrafterConfig):
    """Prompt lookup decoding (Saxena 2023).

    Args:
        max_matching_ngram_size: tokens at the end of the text that are looked for; where they stand
            nowhere else, one less, down to a single one.
        num_pred_tokens: at most this many draft tokens a round.
    """

    name: str = "prompt_lookup"
    max_matching_ngram_size: Count = 3
    num_pred_tokens: DraftSize = 10

    def build(self, lm: TargetModel) -> Drafter:
        return PromptLookup(self.max_matching_ngram_size, self.num_pred_tokens)


class PromptLookup(FromText):
    """Drafts as transformers' `PromptLookupCandidateGenerator` does, token for token. The longest
    n-gram counts, of its places the first; a draft ends before an EOS."""

    def __init__(self, max_matching_ngram_size: int = 3, num_pred_tokens: int = 10):
        self.largest, self.max_nodes = max_matching_ngram_size, num_pred_tokens

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        self.grams = RowStates(lambda _, text: Grams(text, self.largest))

    def continuation(self, row: int, text: list[int]) -> list[int]:
        grams, ends = self.grams.of(row, text), self.batch.ends[row]
        grams.grow()
        for n in range(min(self.largest, len(text) - 1), 0, -1):
            if (end := grams.ends.get(tuple(text[-n:]))) is not None:
                tokens = text[end : end + self.max_nodes]
                return tokens[: next((i for i, token in enumerate(tokens) if token in ends), None)]
        return []


class Grams:
    """Where each n-gram of a text, which grows elsewhere, ends for the first time, for all n up to
    `largest`."""

    def __init__(self, text: list[int], largest: int):
        self.text, self.largest = text, largest
        self.ends: dict[tuple[int, ...], int] = {}
        self.read = 0  # the last end that has been read

    def grow(self) -> None:
        """Read what has been added, but for grams at the very end: nothing follows these yet."""
        for end in range(self.read + 1, len(self.text)):
            for n in range(1, min(self.largest, end) + 1):
                self.ends.setdefault(tuple(self.text[end - n : end]), end)
            self.read = end
