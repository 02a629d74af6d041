"""What prompt lookup drafts: transformers' candidates, token for token, and LLMA's references."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import admit_text, random_prompts, tiny
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from kangaroo.drafters.datastore import index
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.methods import generate
from kangaroo.evaluation.speed.trials import write_by_engine

SIZES = [(1, 1), (2, 10), (3, 10), (5, 3)]  # n-grams, draft tokens


def repeating(length: int, alphabet: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(alphabet, (length,), generator=generator).tolist()


def begun(drafter: PromptLookup, *texts: list[int], eos: tuple[int, ...] = ()) -> SimpleNamespace:
    """Only what the drafter reads of a batch."""
    batch = SimpleNamespace(texts=list(texts), ends=[frozenset(eos)] * len(texts))
    drafter.begin(batch)
    return batch


def by_transformers(text: list[int], ngram: int, count: int, eos: tuple[int, ...]) -> list[int]:
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor(eos) if eos else None,
        num_output_tokens=count,
        max_matching_ngram_size=ngram,
        max_length=10**6,
    )
    return generator.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()


@pytest.mark.parametrize("eos", [(), (2,), (0, 3)])
@pytest.mark.parametrize("alphabet", [4, 12, 60])
@pytest.mark.parametrize("ngram, count", SIZES)
def test_drafts_are_transformers_candidates(ngram, count, alphabet, eos):
    drafter, drafted = PromptLookup(ngram, count), 0
    batch = begun(drafter, [1], [2], eos=eos)
    for seed, length in enumerate((60, 25)):  # the second prompt takes the row of the first
        coming = repeating(length, alphabet, seed)
        batch.texts[1] = text = coming[: 1 + 7 * seed]
        for token in coming[len(text) :]:
            found = drafter.continuation(1, text)
            assert found == by_transformers(text, ngram, count, eos)
            drafted += len(found)
            text.append(token)
    assert drafted > 10


@pytest.mark.parametrize("ngram, count", SIZES)
def test_another_drafters_tokens_are_looked_up_too_but_not_kept(ngram, count):
    drafter = PromptLookup(ngram, count)
    coming = repeating(60, 12, seed=3)
    (text,) = begun(drafter, coming[:1]).texts
    for i, token in enumerate(coming[1:]):
        longer = text + repeating(1 + i % 5, 13, seed=100 + i)
        assert drafter.continuation(0, longer) == by_transformers(longer, ngram, count, ())
        assert drafter.continuation(0, text) == by_transformers(text, ngram, count, ())
        text.append(token)


def in_reference(documents: list[list[int]], gram: list[int], count: int) -> list[int] | None:
    """What follows the first place of a gram."""
    n = len(gram)
    for document in documents:
        for end in range(n, len(document)):
            if document[end - n : end] == gram:
                return document[end : end + count]
    return None


def with_reference(text: list[int], documents: list[list[int]], ngram: int, count: int):
    for n in range(min(ngram, len(text) - 1), 0, -1):
        for searched in ([text], documents):
            found = in_reference(searched, text[-n:], count)
            if found is not None:
                return found
    return []


@pytest.mark.parametrize("ngram, count", SIZES)
def test_a_reference_is_searched_where_the_text_has_no_match_of_that_length(ngram, count):
    documents = [repeating(length, 20, seed=50 + length) for length in (1, 9, 40, 30)]
    drafter = PromptLookup(ngram, count, index(documents, vocab_size=64))
    coming = repeating(50, 22, seed=4)
    (text,) = begun(drafter, coming[:1]).texts
    differs = 0
    for token in coming[1:]:
        expected = with_reference(text, documents, ngram, count)
        assert drafter.continuation(0, text) == expected
        differs += expected != with_reference(text, [], ngram, count)
        text.append(token)
    assert differs > 3


@pytest.mark.parametrize("ngram", [2, 3])
def test_as_many_rounds_as_transformers_generate_takes(ngram):
    """So tokens a forward are the same, round by round."""
    lm = tiny("llama", eos_token_id=5)
    engine = Engine(lm, PromptLookup(ngram, 10))
    speculation = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": ngram}
    accepted = 0
    for prompt in random_prompts(40, 7, 150):
        prompt = prompt + prompt[: len(prompt) // 2]
        ours = write_by_engine(engine, prompt, 60)
        # theirs drafts before its prefill, ours after: so it begins after the token of ours
        other = generate(lm, [*prompt, ours.tokens[0]], 59, **speculation)
        assert ours.tokens[1:] == other.tokens
        written = [len(step.tokens) for step in ours.steps[1:]]
        assert written == [len(step.tokens) for step in other.steps]
        accepted += 59 - len(written)
    assert accepted > 10


def test_a_prompt_of_one_token_in_a_used_row_starts_anew():
    lm = tiny()
    drafter = PromptLookup()
    engine = Engine(lm, drafter)
    batch = engine.open(1, 80, Sampling())
    admit_text(engine, batch, 0, [3, 1, 2, 3])
    assert drafter.propose(batch).tokens_BN.tolist() == [[3, 1, 2, 3]]
    admit_text(engine, batch, 0, [2, 3])  # a prompt of one token, and the first new one
    assert drafter.propose(batch).tokens_BN.tolist() == [[3]]
