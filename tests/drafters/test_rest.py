"""What REST finds in a datastore and the tree that it drafts, against brute force."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from helpers import admit_text, tiny

from kangaroo.drafters.datastore import index
from kangaroo.drafters.rest import Rest, RestConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling

VOCABULARY = 64


def documents_of(count: int, alphabet: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [torch.randint(alphabet, (n,), generator=generator).tolist() for n in lengths]


def brute_tree(documents: list[list[int]], text: list[int], options: RestConfig):
    """Tokens and parents, by the definition; all occurrences are read."""
    for span in range(
        min(options.max_token_span, len(text)), min(2, options.max_token_span) - 1, -1
    ):
        gram, following = tuple(text[-span:]), []
        for document in documents:
            for end in range(span, len(document)):
                if tuple(document[end - span : end]) == gram:
                    following.append(document[end : end + options.steps])
        if following:
            break
    else:
        return [], []
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
    documents = documents_of(20, alphabet, seed=alphabet)
    rest = Rest(index(documents, VOCABULARY), options)
    nodes = 0
    begun = [document[: 1 + len(document) // 2] for document in documents]
    for text in documents_of(30, alphabet + 1, seed=99) + begun:
        expected = brute_tree(documents, text, options)
        assert tree_after(rest, text) == expected
        nodes += len(expected[0])
    assert nodes > 10


def test_of_many_occurrences_those_read_keep_the_distribution():
    documents = [[1, 2, follower] for follower in [3] * 60 + [4] * 30 + [5] * 10]
    options = RestConfig(max_matches=10, num_draft=2)
    assert tree_after(Rest(index(documents, VOCABULARY), options), [1, 2]) == ([3, 4], [0, 0])


def test_a_tree_of_rows_with_and_without_matches():
    lm = tiny()
    documents = [[1, 2, 3, 4], [1, 2, 5]]
    rest = Rest(index(documents, VOCABULARY), RestConfig(num_draft=3))
    engine = Engine(lm, rest)
    batch = engine.open(3, 40, Sampling())
    for row, text in enumerate(([9, 1, 2], [8, 9], [2, 3])):
        admit_text(engine, batch, row, text)
    draft = rest.propose(batch)
    assert draft.valid_BN.tolist() == [[True] * 4, [True, *[False] * 3], [True, True, *[False] * 2]]
    assert draft.tokens_BN[0].tolist() == [2, 3, 5, 4]
    assert draft.tree.parents_BN[0].tolist() == [0, 0, 0, 1]
