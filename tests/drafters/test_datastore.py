"""Datastores: what they find, that a folder is whole and of the right vocabulary; and the tree that
REST drafts, against brute force."""

import json
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import tiny

from kangaroo.data.store import documents
from kangaroo.drafters import datastore
from kangaroo.drafters.datastore import ABOUT, SUFFIXES, TOKENS, index, load, save
from kangaroo.drafters.rest import Rest, RestConfig
from kangaroo.models.loading import byte_tokenizer
from kangaroo.utils.errors import CorruptFile, DataError


def random_documents(alphabet: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(alphabet, (n,), generator=generator).tolist() for n in lengths]


def brute_places(store: datastore.Datastore, gram: list[int]) -> set[int]:
    tokens = store.tokens_L.tolist()
    return {
        start
        for start in range(len(tokens) - len(gram))
        if tokens[start : start + len(gram)] == gram
        and tokens[start + len(gram)] != store.separator
    }


# above 2 ** 8 and 2 ** 16 a token has more bytes
@pytest.mark.parametrize("vocab_size", [6, 300, 65535, 65536, 150000])
def test_every_gram_is_found_where_it_stands(vocab_size):
    """Within its document, and where that goes on."""
    scale = (vocab_size - 1) // 5
    documents = random_documents(6, (5, 1, 70, 40))
    texts = [[scale * token for token in document] for document in documents]
    store = index([*texts, []], vocab_size)
    looked = [text[i : i + n] for text in texts for n in (1, 2, 4) for i in range(len(text))]
    looked += [[*texts[0][-1:], *texts[2][:1]], [scale, scale, scale, 0, scale, 0]]
    for gram in looked:
        found = store.find(gram)
        places = store.suffixes_L[found.start : found.stop].tolist()
        assert len(places) == len(set(places)) and set(places) == brute_places(store, gram)
    order = store.suffixes_L.tolist()
    tokens = store.tokens_L.tolist()
    assert order == sorted(range(len(tokens)), key=lambda start: tokens[start:])


def test_the_longest_end_of_a_text_that_goes_on():
    store = index([[1, 2, 3, 4], [5, 2, 3, 6], [9, 1, 2, 3]], 10)
    span, found = store.longest([7, 1, 2, 3], 16, 2)
    assert (span, len(found)) == (3, 1)  # the last document ends there
    assert store.longest([7, 1, 2, 3], 2, 2)[0] == 2
    assert store.longest([8, 3], 16, 2) == (0, range(0))
    assert store.longest([3], 16, 2) == (0, range(0))


def test_a_loaded_datastore_is_the_one_that_was_saved_and_lies_on_the_disk(tmp_path):
    lm, store = tiny(), index(random_documents(60, (5, 1, 70, 40)), 64)
    folder = save(store, lm, tmp_path / "a" / "store", {"texts": ["x"]})
    loaded = load(str(folder), lm)
    assert np.array_equal(loaded.tokens_L, store.tokens_L)
    assert np.array_equal(loaded.suffixes_L, store.suffixes_L)
    assert isinstance(loaded.tokens_L.base, np.memmap)
    assert loaded.about["texts"] == ["x"] and loaded.about["tokens"] == 120
    assert datastore.read_about(str(folder))["fingerprint"] == store.about["fingerprint"]
    again = save(index([[1, 2]], 64), lm, folder, {})  # replaces it
    assert load(str(again), lm).tokens_L.tolist() == [1, 2, 64]
    assert [path.name for path in folder.parent.iterdir()] == ["store"]


def test_a_datastore_of_another_vocabulary_is_refused_and_both_are_named(tmp_path):
    save(index([[1, 2]], 64), tiny(), tmp_path / "store", {})
    wrong = r"64 tokens.*this target is .*80 tokens.*prepare\.py datastore"
    with pytest.raises(DataError, match=wrong):
        load(str(tmp_path / "store"), tiny(vocab_size=80))


def test_a_folder_without_or_with_a_broken_datastore_is_refused(tmp_path):
    lm, path = tiny(), str(tmp_path / "store")
    with pytest.raises(DataError, match=r"no datastore at .*prepare\.py datastore"):
        load(path, lm)

    def broken(name: str, content: bytes | None):
        save(index([[1, 2]], 64), lm, tmp_path / "store", {})
        file = tmp_path / "store" / name
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(CorruptFile, match="cannot be read"):
            load(path, lm)

    for name in (TOKENS, SUFFIXES):
        for content in (None, b"", b"\x93NUMPY\x01\x00", b"rubbish"):
            broken(name, content)
    about = {"target": "x", "vocab_size": 64, "bos_token_id": None, "tokens": 9}
    for content in (b"{", b"7", json.dumps(about).encode()):
        broken(ABOUT, content)


def test_no_documents_are_refused(tmp_path):
    with pytest.raises(DataError, match="hold no tokens"):
        index([[], []], 64)
    tokenizer = byte_tokenizer()
    with pytest.raises(DataError, match=r"data= or texts="):
        documents(None, [], tokenizer)
    with pytest.raises(DataError, match=r"text 'nowhere\.txt' cannot be read"):
        documents(None, ["nowhere.txt"], tokenizer)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match=r"cannot be read.*UTF-8"):
        documents(None, [str(tmp_path / "bytes")], tokenizer)


def brute_tree(documents: list[list[int]], text: list[int], options: RestConfig):
    """Tokens and parents, by the definition; all occurrences are read."""
    following: list[list[int]] = []
    longest, least = min(options.max_token_span, len(text)), min(2, options.max_token_span)
    for span in range(longest, least - 1, -1):
        following = following or [
            document[end : end + options.steps]
            for document in documents
            for end in range(span, len(document))
            if document[end - span : end] == text[-span:]
        ]
    counts: Counter[tuple[int, ...]] = Counter()  # keeps the order in which prefixes were met
    for tokens in following:
        counts.update(tuple(tokens[:depth]) for depth in range(1, len(tokens) + 1))
    ranked = sorted(counts, key=lambda prefix: (-counts[prefix], len(prefix)))  # it is stable
    chosen = ranked[: options.num_draft]
    number = {prefix: i for i, prefix in enumerate(chosen, start=1)} | {(): 0}
    return [prefix[-1] for prefix in chosen], [number[prefix[:-1]] for prefix in chosen]


def tree_after(rest: Rest, text: list[int]):
    return rest.tree_of(SimpleNamespace(texts=[text]), 0)


OPTIONS = [
    RestConfig(),
    RestConfig(max_token_span=4, steps=3, num_draft=7),
    RestConfig(max_token_span=1, steps=4, num_draft=20),
    RestConfig(max_token_span=3, steps=1, num_draft=2),
]


@pytest.mark.parametrize("alphabet", [2, 5, 30])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_the_tree_is_that_of_the_most_frequent_prefixes(options, alphabet):
    documents = random_documents(alphabet, range(1, 60, 3), seed=alphabet)
    rest, nodes = Rest(index(documents, 64), options), 0
    begun = [document[: 1 + len(document) // 2] for document in documents]
    for text in random_documents(alphabet + 1, range(1, 60, 2), seed=99) + begun:
        expected = brute_tree(documents, text, options)
        assert tree_after(rest, text) == expected
        nodes += len(expected[0])
    assert nodes > 10


def test_of_many_occurrences_those_read_keep_the_distribution():
    documents = [[1, 2, follower] for follower in [3] * 60 + [4] * 30 + [5] * 10]
    options = RestConfig(max_matches=10, num_draft=2)
    assert tree_after(Rest(index(documents, 64), options), [1, 2]) == ([3, 4], [0, 0])
