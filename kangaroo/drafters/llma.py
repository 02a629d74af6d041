"""LLMA: prompt lookup that also copies from documents that the user gives as references."""

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kangaroo.drafters import datastore
from kangaroo.drafters.base import Drafter, DrafterConfig
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, DraftSize

FROM_FILES = ("~data", "texts=[FILE,...]")  # builds a datastore from the user's documents


@dataclass
class LlmaConfig(DrafterConfig):
    """LLMA, inference with reference (arXiv 2304.04487).

    Args:
        trigger_length: the fewest tokens at the end of the text that must occur in a reference (n).
        longest_trigger: the most tokens at the end of the text to look up; the longest that occur
            count. 5 in the released code.
        copy_length: the most tokens to copy, which are the draft of a round (k).
        references: the folder, from `scripts/prepare.py datastore`, of documents to copy from; None
            copies from the text alone, with the documents of its prompt.
    """

    name: str = "llma"
    trigger_length: Count = 1
    longest_trigger: Count = 5
    copy_length: DraftSize = 20
    references: str | None = None

    def build(self, lm: TargetModel) -> Drafter:
        """Errors: those of `datastore.load`."""
        named = self.references
        return Llma(self, datastore.load(named, lm, *FROM_FILES) if named else None)

    def settings(self) -> dict[str, Any]:
        named = self.references
        about = datastore.read_about(named, *FROM_FILES) if named else {}
        return super().settings() | {"fingerprint": about.get("fingerprint")}


class Llma(PromptLookup):
    """Copies what follows the first occurrence of the longest trigger: in the references, in their
    order, or else in the text. A copy ends with its document, and before an EOS."""

    def __init__(self, options: LlmaConfig, references: datastore.Datastore | None = None):
        longest = max(options.longest_trigger, options.trigger_length)
        super().__init__(longest, options.copy_length, options.trigger_length)
        self.references = references

    def continuation(self, row: int, text: list[int]) -> list[int]:
        length, end = self.match(row, text)
        copied, store = text[end : end + self.max_nodes], self.references
        if store:
            in_references, places = store.longest(text, self.max_ngram, self.min_ngram)
            if in_references and in_references >= length:
                starts = store.suffixes_L[places.start : places.stop]
                start = int(starts.min()) + in_references
                tokens = store.tokens_L[start : start + self.max_nodes].tolist()
                copied = list(takewhile(lambda token: token < store.separator, tokens))
        return self.before_eos(row, copied)
