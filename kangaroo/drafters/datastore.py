"""A searchable store of documents: an array of their tokens, and its suffix array.

Shapes: L tokens, with a separator after each document.
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kangaroo.engine.clock import running
from kangaroo.models.loading import model_options
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import CorruptFile, DataError, MissingPackage
from kangaroo.utils.folders import command_line, install, new_folder, resolve_path, write_json

TOKENS = "tokens.npy"
SUFFIXES = "suffixes.npy"
ABOUT = "datastore.json"


@dataclass
class Datastore:
    """Tokens of documents, each followed by the separator, which is above every token; the starts
    of their suffixes in sorted order; and counts, a fingerprint, and the documents' origin."""

    tokens_L: np.ndarray
    suffixes_L: np.ndarray
    separator: int
    about: dict[str, Any]

    def find(self, gram: Sequence[int]) -> range:
        """The places in `suffixes_L` of an n-gram's occurrences that are not a document's end."""
        low = 0
        high = len(self.suffixes_L)
        places = range(high)
        for depth, token in enumerate(gram):
            key = partial(self._token, depth)
            low = bisect_left(places, token, low, high, key=key)
            high = bisect_right(places, token, low, high, key=key)
        after = partial(self._token, len(gram))
        return range(low, bisect_left(places, self.separator, low, high, key=after))

    def longest(self, text: Sequence[int], max_tokens: int, min_tokens: int) -> tuple[int, range]:
        """The length of the longest suffix of a text that occurs, from `min_tokens` to `max_tokens`
        tokens, and its places (`find`); 0 and no places if none occurs."""
        spans = range(min_tokens, min(max_tokens, len(text)) + 1)
        # if a suffix occurs, then the shorter ones do, too
        count = bisect_left(spans, True, key=lambda span: not self.find(text[-span:]))
        return (spans[count - 1], self.find(text[-spans[count - 1] :])) if count else (0, range(0))

    def _token(self, depth: int, place: int) -> int:
        return int(self.tokens_L[int(self.suffixes_L[place]) + depth])


def check_installed() -> None:
    """Raise `MissingPackage` without the package that makes a datastore."""
    if find_spec("pydivsufsort") is None:
        raise MissingPackage(
            "the package pydivsufsort, which makes a datastore, is not installed: "
            f"{install('datastore')}."
        )


def index(documents: Iterable[Sequence[int]], vocab_size: int) -> Datastore:
    """A datastore of all documents with tokens. Errors: `DataError` for none, `MissingPackage`."""
    check_installed()
    from pydivsufsort import divsufsort

    start = running()
    dtype = np.uint16 if vocab_size <= np.iinfo(np.uint16).max else np.uint32
    arrays = [np.array([*document, vocab_size], dtype) for document in documents if document]
    if not arrays:
        raise DataError("the documents hold no tokens, so there is nothing to search.")
    tokens_L = np.concatenate(arrays)
    suffixes_L = divsufsort(tokens_L)
    if len(tokens_L) <= np.iinfo(np.int32).max:
        suffixes_L = suffixes_L.astype(np.int32)
    about = {
        "vocab_size": vocab_size,
        "documents": len(arrays),
        "tokens": len(tokens_L),
        "fingerprint": hashlib.sha256(tokens_L.tobytes()).hexdigest()[:16],
        "build_seconds": round(running() - start, 3),
    }
    return Datastore(tokens_L, suffixes_L, vocab_size, about)


def save(store: Datastore, lm: TargetModel, folder: Path, facts: dict[str, Any]) -> Path:
    """Write a datastore of `lm`'s vocabulary, with `facts` in its JSON. The folder appears when it
    is complete, and replaces an older datastore. Errors: `DataError` if it is something else."""
    if folder.exists() and not (folder / ABOUT).is_file():
        raise DataError(f"'{folder}' exists and is no datastore; pass another output=.")
    with new_folder(folder, replace=True) as new:
        np.save(new / TOKENS, store.tokens_L)
        np.save(new / SUFFIXES, store.suffixes_L)
        write_json(new / ABOUT, {"target": lm.name} | identity(lm) | store.about | facts)
    return folder


def load(path: str, lm: TargetModel, *how: str) -> Datastore:
    """A datastore of `lm`'s vocabulary, whose arrays stay on the disk until they are read; `how`
    has words of the command that builds one. Errors: `DataError` if there is none, or one of
    another vocabulary; `CorruptFile`."""
    about = read_about(path, *how)
    folder = resolve_path(path)
    expected = identity(lm)
    stored = {name: about.get(name) for name in expected}
    if stored != expected:
        words = "{vocab_size} tokens, BOS {bos_token_id}".format_map
        raise DataError(
            f"datastore '{path}' was built for {about.get('target')} ({words(stored)}); this "
            f"target is {lm.name} ({words(expected)}). Build one for it: "
            f"{command_line('prepare datastore', *how, **model_options(lm.name))}"
        )
    try:
        # plain arrays, since indexing a memmap takes several times as long
        tokens_L = np.asarray(np.load(folder / TOKENS, mmap_mode="r"))
        suffixes_L = np.asarray(np.load(folder / SUFFIXES, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        raise _unreadable(path, error) from error
    if not len(tokens_L) == len(suffixes_L) == about.get("tokens"):
        counts = f"{len(tokens_L)} tokens and {len(suffixes_L)} suffixes"
        raise _unreadable(path, f"{counts}, not {about.get('tokens')}")
    return Datastore(tokens_L, suffixes_L, lm.config.vocab_size, about)


def read_about(path: str, *how: str) -> dict[str, Any]:
    """A datastore's metadata; `how` is as in `load`. Errors: `DataError` if there is no
    datastore, `CorruptFile`."""
    file = resolve_path(path) / ABOUT
    if not file.is_file():
        model = Path(path).name.removesuffix("-datastore")
        target = {"model": "MODEL"} if how else model_options(model)
        output = f"{path}-datastore" if file.parent.is_file() else path
        raise DataError(
            f"no datastore at '{path}' ({ABOUT} is missing). Build one: "
            f"{command_line('prepare datastore', *how, **target, output=output)}"
        )
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise _unreadable(path, error) from error


def identity(lm: TargetModel) -> dict[str, Any]:
    """What tells vocabularies apart, as far as a model without its tokenizer knows."""
    return {"vocab_size": lm.config.vocab_size, "bos_token_id": lm.config.bos_token_id}


def _unreadable(path: str, error: Exception | str) -> CorruptFile:
    return CorruptFile(f"datastore '{path}' cannot be read ({error}); build it again.")
