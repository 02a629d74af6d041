"""The documents that a datastore is made of, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.utils.errors import DataError


def documents(
    dataset: str | None, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[int]], dict[str, Any]]:
    """The token ids of each document, and the origin of all as JSON values.

    Args:
        dataset: folder of a finished dataset; each conversation is a document.
        texts: files; each is a document, without BOS or other special tokens.

    Errors: `DataError` where there is nothing, or a file cannot be read as text.
    """
    if dataset is None and not texts:
        raise DataError("nothing to build a datastore of; pass data= or texts=[file, ...].")
    collected: list[list[int]] = []
    origin: dict[str, Any] = {"dataset": None, "texts": list(texts)}
    if dataset is not None:
        samples, origin["dataset"] = store.load(Path(dataset))
        collected += [sample["input_ids"] for sample in samples]
    for path in texts:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"text '{path}' cannot be read ({error}); pass UTF-8 files.") from error
        collected.append(tokenizer.encode(text, add_special_tokens=False))
    return collected, origin
