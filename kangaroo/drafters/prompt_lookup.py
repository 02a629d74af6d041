"""Prompt lookup: what followed the text's last tokens where they stood before follows again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kangaroo.drafters import datastore
from kangaroo.drafters.base import DrafterConfig, FromText
from kangaroo.drafters.datastore import Datastore
from kangaroo.engine.batch import Batch
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, DraftSize


@dataclass
class PromptLookupConfig(DrafterConfig):
    """Prompt lookup decoding (Saxena 2023), with reference documents LLMA (arXiv 2304.04487).

    Args:
        max_matching_ngram_size: tokens at the end of the text that are looked for; where they stand
            nowhere else, one less, down to a single one.
        num_pred_tokens: at most this many draft tokens a round.
        reference: folder of a datastore (`scripts/prepare.py datastore`) that is searched for what
            the text itself does not have; null searches the text alone.
    """

    name: str = "prompt_lookup"
    max_matching_ngram_size: Count = 3
    num_pred_tokens: DraftSize = 10
    reference: str | None = None

    def build(self, lm: TargetModel) -> PromptLookup:
        """Errors: `ConfigError`, and whatever `kangaroo.drafters.datastore.load` raises."""
        reference = None if self.reference is None else datastore.load(self.reference, lm)
        return PromptLookup(self.max_matching_ngram_size, self.num_pred_tokens, reference)

    def settings(self) -> dict[str, Any]:
        if self.reference is None:
            return super().settings()
        return super().settings() | {"fingerprint": datastore.fingerprint(self.reference)}


class PromptLookup(FromText):
    """Drafts as transformers' `PromptLookupCandidateGenerator` does, token for token.

    The longest n-gram counts, of its places the first; a draft ends before an EOS. A reference is
    asked for n tokens where the text has them nowhere else, before fewer are looked for.
    """

    def __init__(
        self,
        max_matching_ngram_size: int = 3,
        num_pred_tokens: int = 10,
        reference: Datastore | None = None,
    ):
        self.largest, self.max_nodes = max_matching_ngram_size, num_pred_tokens
        self.reference = reference

    def begin(self, batch: Batch) -> None:
        self.batch = batch
        self.grams = [Grams(text, self.largest) for text in batch.texts]

    def continuation(self, row: int, text: list[int]) -> list[int]:
        committed = self.batch.texts[row]
        if self.grams[row].text is not committed:  # another prompt has taken the row
            self.grams[row] = Grams(committed, self.largest)
        grams = self.grams[row]
        grams.grow()
        for n in range(min(self.largest, len(text) - 1), 0, -1):
            end = grams.first(text, n)
            if end is not None:
                return self._until_eos(row, text[end : end + self.max_nodes])
            places = self.reference.find(text[-n:]) if self.reference else range(0)
            if self.reference and places:
                start = int(self.reference.suffixes_L[places.start : places.stop].min()) + n
                return self._until_eos(row, self.reference.after(start, self.max_nodes))
        return []

    def _until_eos(self, row: int, tokens: list[int]) -> list[int]:
        ends = (i for i, token in enumerate(tokens) if token in self.batch.ends[row])
        return tokens[: next(ends, None)]


class Grams:
    """Where each n-gram of a growing text ends for the first time, for all n up to `largest`.

    Args:
        text: the text itself, which grows elsewhere.
    """

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

    def first(self, longer: list[int], n: int) -> int | None:
        """Where the last n tokens of `longer` end for the first time, and something follows.

        Args:
            longer: the text, or it and more; that is read without being kept.
        """
        gram = tuple(longer[-n:])
        if gram in self.ends:
            return self.ends[gram]
        added = range(max(self.read + 1, n), len(longer))
        return next((end for end in added if tuple(longer[end - n : end]) == gram), None)
