"""What prompt lookup drafts: transformers' candidates, token for token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import admit_text, random_prompts, tiny
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.speed.trials import timed_engine, timed_generate

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


@pytest.mark.parametrize("ngram", [2, 3])
def test_as_many_rounds_as_transformers_generate_takes(ngram):
    """So tokens a forward are the same, round by round."""
    lm = tiny("llama", eos_token_id=5)
    own = timed_engine(Engine(lm, PromptLookup(ngram, 10)))
    theirs = timed_generate(lm, prompt_lookup_num_tokens=10, max_matching_ngram_size=ngram)
    accepted = 0
    for prompt in random_prompts(40, 7, 150):
        prompt = prompt + prompt[: len(prompt) // 2]
        ours = own(prompt, 60)
        # theirs drafts before its prefill, ours after: so it begins after the token of ours
        other = theirs([*prompt, ours.tokens[0]], 59)
        assert ours.tokens[1:] == other.tokens
        _, *written = [count for count, _ in ours.rounds]
        assert written == [count for count, _ in other.rounds]  # its first one is timed apart
        accepted += 59 - len(ours.rounds)
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
