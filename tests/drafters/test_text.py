"""What is drafted from the text alone: prompt lookup, a suffix automaton, Token Recycling. And from
a datastore: what it finds, that a folder is whole, and REST's tree, against brute force."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import forward_logits, longest_earlier_match, random_prompts, tiny
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from kangaroo import CorruptFile, DataError, Sampling
from kangaroo.data.store import documents
from kangaroo.drafters import datastore
from kangaroo.drafters.datastore import ABOUT, SUFFIXES, TOKENS, index, load, save
from kangaroo.drafters.llma import Llma, LlmaConfig
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.drafters.rest import Rest, RestConfig
from kangaroo.drafters.suffix import Suffix, SuffixAutomaton
from kangaroo.drafters.token_recycling import CHANCES, TokenRecycling, static_tree
from kangaroo.engine.budget import Budget
from kangaroo.engine.costs import VerifyCosts
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.models.loading import byte_tokenizer

OPTIONS = [
    RestConfig(),
    RestConfig(max_token_span=4, steps=3, num_draft=7),
    RestConfig(max_token_span=1, steps=4, num_draft=20),
    RestConfig(max_token_span=3, steps=1, num_draft=2),
]


def random_texts(alphabet: int, lengths, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(alphabet, (n,), generator=generator).tolist() for n in lengths]


def begun(drafter, *texts: list[int], eos: tuple[int, ...] = ()) -> SimpleNamespace:
    """Only what the drafter reads of a batch."""
    rows = len(texts)
    batch = SimpleNamespace(texts=[*texts], done=[False] * rows, ends=[frozenset(eos)] * rows)
    drafter.begin(batch)
    return batch


def by_transformers(text: list[int], ngram: int, count: int, eos: tuple[int, ...]) -> list[int]:
    ends = torch.tensor(eos) if eos else None
    generator = PromptLookupCandidateGenerator(ends, count, ngram, max_length=10**6)
    return generator.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()


@pytest.mark.parametrize("eos", [(), (0, 3)])
@pytest.mark.parametrize("alphabet", [4, 12, 60])
@pytest.mark.parametrize("ngram, count", [(1, 1), (2, 10), (3, 10), (5, 3)])
def test_drafts_are_transformers_candidates(ngram, count, alphabet, eos):
    drafter, drafted = PromptLookup(ngram, count), 0
    batch = begun(drafter, [1], [2], eos=eos)
    for seed, length in enumerate((60, 25)):  # the second prompt takes the row of the first
        (coming,) = random_texts(alphabet, [length], seed)
        batch.texts[1] = text = coming[: 1 + 7 * seed]
        for token in coming[len(text) :]:
            continuation = drafter.continuation(1, text)
            assert continuation == by_transformers(text, ngram, count, eos)
            drafted += len(continuation)
            text.append(token)
    assert drafted > 10


def by_the_pseudo_code(
    documents: list[list[int]], text: list[int], options: LlmaConfig, eos: tuple[int, ...]
) -> list[int]:
    """LLMA on lists: the longest trigger first; the documents in their order, then the text."""
    for n in range(options.longest_trigger, options.trigger_length - 1, -1):
        for document in (*documents, text):
            for start in range(len(document) - n):  # something follows
                if document[start : start + n] == text[-n:]:
                    copied = document[start + n : start + n + options.copy_length]
                    return copied[: next((i for i, x in enumerate(copied) if x in eos), None)]
    return []


@pytest.mark.parametrize("eos", [(), (0, 3)])
@pytest.mark.parametrize("alphabet", [4, 12, 60])
@pytest.mark.parametrize("trigger, longest, count", [(1, 5, 20), (2, 5, 7), (3, 3, 4), (1, 1, 2)])
def test_llma_copies_what_its_pseudo_code_does(trigger, longest, count, alphabet, eos):
    documents = random_texts(alphabet, (9, 40, 1, 25), seed=alphabet)
    options = LlmaConfig("llma", trigger, longest, count)
    (coming,) = random_texts(alphabet, [80], seed=7)
    for references in (documents, []):
        drafter = Llma(options, index(references, alphabet) if references else None)
        text, drafted, from_documents = coming[:1], 0, 0
        batch = begun(drafter, text, eos=eos)
        for token in coming[1:]:
            copied = drafter.continuation(0, batch.texts[0])
            assert copied == by_the_pseudo_code(references, text, options, eos)
            drafted += len(copied)
            from_documents += copied != by_the_pseudo_code([], text, options, eos)
            text.append(token)
        if alphabet == 4:
            assert drafted > 10 and bool(from_documents) == bool(references)


def test_llma_takes_references_of_its_vocabulary_and_names_them_in_results(tmp_path):
    lm = tiny()
    config = LlmaConfig(references=str(tmp_path / "references"))
    with pytest.raises(DataError, match=r"no datastore at '.*references'.*texts=\[FILE,"):
        config.build(lm)
    store = index([[1, 2, 3, 4]], lm.config.vocab_size)
    save(store, lm, tmp_path / "references", {})
    drafter = config.build(lm)
    begun(drafter, [5, 2])
    assert drafter.continuation(0, [5, 2]) == [3, 4]
    assert config.settings()["fingerprint"] == store.about["fingerprint"]
    assert LlmaConfig().settings()["fingerprint"] is None


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8, 40])
def test_what_followed_the_longest_end_that_stood_before_is_known_after_every_token(alphabet):
    """A continuation that reaches the end of the text goes on with itself."""
    automaton, matched = SuffixAutomaton(), 0
    (text,) = random_texts(alphabet, [120], seed=alphabet)
    for end in range(1, len(text) + 1):
        automaton.follow(text[:end])
        assert automaton.tokens == text[:end]
        length, place = automaton.length, automaton.place
        expected, places = longest_earlier_match(text[:end])
        assert length == expected and place in places
        drafted = automaton.continuation(10)
        assert drafted == (text[:end] + drafted)[place : place + 10 * (length > 0)]
        matched += length > 0
    assert matched > 60


def test_the_last_of_several_places_counts():
    (automaton := SuffixAutomaton()).follow([1, 2, 7, 1, 2, 8, 1, 2])
    assert automaton.continuation(3) == [8, 1, 2]


def test_a_draft_is_as_long_as_the_match_allows_and_ends_with_an_eos():
    text = [1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 4]
    for alpha, limit, count in ((1.0, 9, 3), (2.0, 9, 6), (2.0, 4, 4), (0.3, 9, 0)):
        drafter = Suffix(limit, alpha)
        begun(drafter, text)
        assert drafter.continuation(0, text) == [5, 6, 7, 9, 2, 3][:count]
    begun(drafter := Suffix(9, 2.0), text, eos=(6,))
    assert drafter.continuation(0, text) == [5, 6]


def batch_of(drafter: TokenRecycling, *texts: list[int], costs: VerifyCosts | None = None):
    budget = Budget((costs or VerifyCosts([1, 2], [1.0, 1.0], 0.5)).curve, always=costs is None)
    active = range(len(texts))
    batch = SimpleNamespace(texts=[*texts], size=len(texts), active=active, budget=budget)
    batch.likeliest, batch.verified = 0, [[] for _ in texts]
    drafter.begin(batch)
    return batch


def test_a_tree_follows_the_matrix_by_rank_and_leaves_out_what_nothing_is_known_of():
    drafter = TokenRecycling(nodes=4)
    batch = batch_of(drafter, [1, 2, 3, 1, 4, 1])
    paths, chances = zip(*static_tree(4), strict=True)  # the likeliest tokens
    assert paths == ((0,), (0, 0), (1,), (0, 0, 0))
    assert chances == pytest.approx([CHANCES[0], CHANCES[0] ** 2, CHANCES[1], CHANCES[0] ** 3])
    # 1 was followed by 2, and then by 4, whose successor is 1
    assert drafter.tree_of(batch, 0) == ([4, 1, 2, 4], [0, 1, 0, 2])
    batch.verified[0] += [(1, [7, 8, 9]), (8, [1])]
    assert drafter.tree_of(batch, 0) == ([7, 8], [0, 0])  # nothing is known of 7
    assert not batch.verified[0]
    batch.texts[0] = [6, 1]
    assert drafter.tree_of(batch, 0) == ([], [])  # another prompt has taken the row


def test_rows_of_a_batch_draft_what_pays(measured_budget):
    texts, nodes = [[1, 2, 3, 1, 2, 3]] * 2, []
    for node in (0.0, 0.05, 1.0):
        drafter = TokenRecycling(nodes=3)
        batch = batch_of(drafter, *texts, costs=VerifyCosts([2, 4], [1.0, 1.0 + 2 * node], 0.5))
        nodes.append(len(drafter.tree_of(batch, 1)[0]))
    assert nodes == [2, 1, 0]


@pytest.mark.parametrize("compiled", [False, True])
def test_every_verified_node_says_the_targets_likeliest_tokens(compiled):
    lm = tiny()
    lm = lm.compile_for_decoding() if compiled else lm
    engine = Engine(lm, TokenRecycling(9), always_drafts=True)
    session = engine.open(2, 80, Sampling(temperature=1.0))
    batch = session.batch
    for row, prompt in enumerate(random_prompts(5, 30)):
        session.admit(row, Request(prompt * 2, 12))
    nodes = 0
    for _ in range(6):
        trees = [engine.drafter.tree_of(batch, row) for row in range(2)]
        texts = [list(text) for text in batch.texts]
        session.step()
        for text, (tokens, parents), verified in zip(texts, trees, batch.verified, strict=True):
            paths = [text]
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*paths[parent], token])
            assert [token for token, _ in verified] == [path[-1] for path in paths]
            for path, (_, likeliest) in zip(paths, verified, strict=True):
                assert likeliest == forward_logits(lm, path)[-1].topk(len(CHANCES)).indices.tolist()
            nodes += len(tokens)
    assert nodes > 10


def brute_places(store: datastore.Datastore, gram: list[int]) -> set[int]:
    tokens = store.tokens_L.tolist()
    ends = range(len(gram), len(tokens))
    places = {end - len(gram) for end in ends if tokens[end - len(gram) : end] == gram}
    return {start for start in places if tokens[start + len(gram)] != store.separator}


# above 2 ** 8 and 2 ** 16 a token has more bytes
@pytest.mark.parametrize("vocab_size", [6, 300, 65535, 65536, 150000])
def test_every_gram_is_found_where_it_stands(vocab_size):
    scale = (vocab_size - 1) // 5
    documents = random_texts(6, (5, 1, 70, 40))
    texts = [[scale * token for token in document] for document in documents]
    store = index([*texts, []], vocab_size)
    looked = [text[i : i + n] for text in texts for n in (1, 2, 4) for i in range(len(text))]
    looked += [[*texts[0][-1:], *texts[2][:1]], [scale, scale, scale, 0, scale, 0]]
    for gram in looked:
        rows = store.find(gram)
        places = store.suffixes_L[rows.start : rows.stop].tolist()
        assert len(places) == len(set(places)) and set(places) == brute_places(store, gram)
    tokens = store.tokens_L.tolist()
    assert store.suffixes_L.tolist() == sorted(range(len(tokens)), key=lambda i: tokens[i:])


def test_a_loaded_datastore_is_the_one_that_was_saved_and_lies_on_the_disk(tmp_path):
    lm, store = tiny(), index(random_texts(60, (5, 1, 70, 40)), 64)
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
        documents(None, [], tokenizer, 259)
    with pytest.raises(DataError, match=r"text 'nowhere\.txt' cannot be read"):
        documents(None, ["nowhere.txt"], tokenizer, 259)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match=r"cannot be read.*UTF-8"):
        documents(None, [str(tmp_path / "bytes")], tokenizer, 259)


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


@pytest.mark.parametrize("alphabet", [2, 5, 30])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_the_tree_is_that_of_the_most_frequent_prefixes(options, alphabet):
    documents = random_texts(alphabet, range(1, 60, 3), seed=alphabet)
    rest, nodes = Rest(index(documents, 64), options), 0
    begun = [document[: 1 + len(document) // 2] for document in documents]
    for text in random_texts(alphabet + 1, range(1, 60, 2), seed=99) + begun:
        expected = brute_tree(documents, text, options)
        assert tree_after(rest, text) == expected
        nodes += len(expected[0])
    assert nodes > 10


def test_of_many_occurrences_those_read_keep_the_distribution():
    documents = [[1, 2, follower] for follower in [3] * 60 + [4] * 30 + [5] * 10]
    options = RestConfig(max_matches=10, num_draft=2)
    assert tree_after(Rest(index(documents, 64), options), [1, 2]) == ([3, 4], [0, 0])
