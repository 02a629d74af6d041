"""A text ends where it must: with its first EOS, or with the token that completes a stop string."""

from __future__ import annotations

from dataclasses import replace

import engine_cases
import pytest
from cases import DRAFTERS
from engine_cases import HOT, NEW_TOKENS, PROMPTS, Letters, continuations, fresh_place
from helpers import (
    VOCABULARY,
    oracle,
    vanilla_texts,
)

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request

case = pytest.fixture(scope="module")(engine_cases.native_case)


@pytest.fixture
def ends_with(case):
    """Sets the tokens that end a text."""
    config = case.lm.hf.generation_config

    def set_eos(ids: int | list[int] | None) -> None:
        config.eos_token_id = ids

    yield set_eos
    config.eos_token_id = None


def until(tokens: list[int], eos: set[int]) -> list[int]:
    """`tokens` up to and with the first that lies in `eos`."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:end]


# ---- end of text -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 2, 5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_ends_with_its_first_eos(case, ends_with, name, place):
    """Of three rows, which end at different times; `place` is where the EOS lies in the first."""
    eos = continuations(case)[0][place]
    ends_with(eos)
    done = Engine(case.lm, DRAFTERS[name](case)).generate(PROMPTS, NEW_TOKENS, HOT)
    for generation, unbroken in zip(done, continuations(case), strict=True):
        assert generation.tokens == until(unbroken, {eos})
        assert generation.finish == ("eos" if eos in unbroken else "length")
        assert sum(len(step.tokens) for step in generation.steps) == len(generation.tokens)


def test_any_of_several_eos_ids_ends_a_text(case, ends_with):
    eos = {continuations(case)[0][4], continuations(case)[1][2]}
    ends_with(sorted(eos))
    done = Engine(case.lm, DRAFTERS["kangaroo"](case)).generate(PROMPTS, NEW_TOKENS, HOT)
    assert [g.tokens for g in done] == [until(c, eos) for c in continuations(case)]


@pytest.mark.parametrize("name", ["kangaroo", "prompt-lookup", "medusa"])
def test_a_request_may_ignore_eos_while_others_in_the_batch_end_with_it(case, ends_with, name):
    eos = continuations(case)[0][2]
    ends_with(eos)
    engine = Engine(case.lm, DRAFTERS[name](case))
    for ignoring in (0, 1):  # a row keeps nothing of the request before
        requests = [
            Request(PROMPTS[0], NEW_TOKENS, seed=HOT.seed, ignore_eos=row == ignoring)
            for row in range(2)
        ]
        done = dict(engine.completions(requests, HOT, batch_size=2))
        assert done[ignoring].tokens == continuations(case)[0]
        assert done[1 - ignoring].tokens == until(continuations(case)[0], {eos})
        assert (done[ignoring].finish, done[1 - ignoring].finish) == ("length", "eos")


def test_eos_inside_an_accepted_draft_cuts_the_rest(case, ends_with):
    tokens = continuations(case)[0]
    place = fresh_place(tokens)
    ends_with(tokens[place])
    engine = Engine(case.lm, oracle(case.texts, steps=place + 3))
    (done,) = engine.generate(PROMPTS[:1], NEW_TOKENS, HOT)
    assert done.tokens == tokens[: place + 1]
    prefill, step = done.steps
    assert prefill.tokens == tokens[:1]
    assert (step.drafted, step.accepted) == (place + 3, place)  # cut tokens do not count


def test_eos_as_the_bonus_token_ends_the_text(case, ends_with):
    tokens = continuations(case)[0]
    place = fresh_place(tokens)
    ends_with(tokens[place])
    engine = Engine(case.lm, oracle(case.texts, steps=place - 1))
    (done,) = engine.generate(PROMPTS[:1], NEW_TOKENS, HOT)
    assert done.tokens == tokens[: place + 1]
    assert [step.accepted for step in done.steps] == [0, place - 1]


def test_eos_in_a_draft_beyond_the_limit_is_not_written(case, ends_with):
    tokens = continuations(case)[0]
    place = fresh_place(tokens)
    ends_with(tokens[place])
    engine = Engine(case.lm, oracle(case.texts, steps=place + 3))
    (done,) = engine.generate(PROMPTS[:1], place, HOT)
    assert done.tokens == tokens[:place]
    assert done.finish == "length"


@pytest.fixture(scope="module")
def after_eos(case) -> tuple[int, list[list[int]], list[list[int]]]:
    """A token, prompts that end with it, and vanilla's texts."""
    unused = next(t for t in range(VOCABULARY) if t not in continuations(case)[0])
    prompts = [[*PROMPTS[0], unused], [unused]]
    return unused, prompts, vanilla_texts(case.lm, prompts, NEW_TOKENS, HOT)


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_eos_in_the_prompt_ends_nothing(case, after_eos, ends_with, name):
    """The end of the user's turn, as a chat template writes it just before the answer."""
    unused, prompts, texts = after_eos
    ends_with(unused)
    engine = Engine(case.lm, DRAFTERS[name](replace(case, texts=texts)))
    for prompt, text, generation in zip(
        prompts, texts, engine.generate(prompts, NEW_TOKENS, HOT), strict=True
    ):
        assert generation.tokens == until(text[len(prompt) :], {unused})


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_that_has_ended_writes_nothing_more(case, ends_with, name):
    ends_with(continuations(case)[0][0])
    engine = Engine(case.lm, DRAFTERS[name](case))
    batch = engine.open(2, 60, HOT)
    first, _ = (
        engine.admit(batch, row, Request(PROMPTS[row], NEW_TOKENS, seed=HOT.seed + row))
        for row in range(2)
    )
    assert first.tokens == continuations(case)[0][:1] and first.finish == "eos"
    length = batch.lengths[0]
    for _ in range(3):
        after, _ = engine.step(batch)
        assert (after.tokens, after.accepted, after.drafted) == ([], 0, 0)
    assert batch.lengths[0] == int(batch.length_B[0]) == length


def test_eos_at_the_limit_is_reported_as_eos(case, ends_with):
    tokens = continuations(case)[0]
    place = fresh_place(tokens)
    ends_with(tokens[place])
    (done,) = Engine(case.lm, Vanilla()).generate(PROMPTS[:1], place + 1, HOT)
    assert done.finish == "eos"


# ---- stop strings ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_text_ends_with_the_token_that_completes_a_stop_string(case, name, width):
    tokens = continuations(case)[0]
    place = fresh_place(tokens)
    letters = Letters()
    stop = letters.decode(tokens[place + 1 - width : place + 1])[1:]  # from inside a token on
    engine = Engine(case.lm, DRAFTERS[name](case), letters)
    done = engine.generate(PROMPTS, NEW_TOKENS, HOT, stop=["never", stop])
    assert done[0].tokens == tokens[: place + 1]
    assert done[0].finish == "stop"
    for generation, unbroken in zip(done, continuations(case), strict=True):
        ends = [i for i in range(1, NEW_TOKENS + 1) if stop in letters.decode(unbroken[:i])]
        assert generation.tokens == unbroken[: min([*ends, NEW_TOKENS])]
        assert generation.tokens == [t for step in generation.steps for t in step.tokens]


def test_a_stop_string_inside_an_accepted_draft_cuts_the_rest(case):
    tokens = continuations(case)[0]
    place = fresh_place(tokens)
    engine = Engine(case.lm, oracle(case.texts, steps=place + 3), Letters())
    (done,) = engine.generate(PROMPTS[:1], NEW_TOKENS, HOT, stop=[f"<{tokens[place]}>"])
    assert done.tokens == tokens[: place + 1]
    assert (done.steps[-1].accepted, len(done.steps[-1].tokens)) == (place, place)


def test_a_stop_character_may_be_made_of_several_tokens(case):
    tokens = continuations(case)[0]
    place = fresh_place(tokens)
    raw = {tokens[place - 1]: b"\xc3", tokens[place]: b"\xa9"}
    for name in ("vanilla", "oracle"):
        engine = Engine(case.lm, DRAFTERS[name](case), Letters(raw))
        (done,) = engine.generate(PROMPTS[:1], NEW_TOKENS, HOT, stop=["é"])
        assert done.tokens == tokens[: place + 1]


def test_a_stop_string_is_found_though_decoding_strips_a_leading_space(case):
    """As SentencePiece tokenizers do: a window of just the stop string's tokens hides it."""
    tokens = continuations(case)[0]
    place = fresh_place(tokens)

    class Stripping(Letters):
        def decode(self, tokens):
            return super().decode(tokens).removeprefix(" ")

    engine = Engine(case.lm, oracle(case.texts), Stripping({tokens[place]: b" "}))
    (done,) = engine.generate(PROMPTS[:1], NEW_TOKENS, HOT, stop=[" "])
    assert done.tokens == tokens[: place + 1]


def test_the_prompt_does_not_complete_a_stop_string(case):
    engine = Engine(case.lm, Vanilla(), Letters())
    stop = Letters().decode([PROMPTS[0][-1], continuations(case)[0][0]])
    (done,) = engine.generate(PROMPTS[:1], 4, HOT, stop=[stop])
    assert len(done.tokens) == 4


def test_a_row_that_stopped_drafts_and_writes_nothing_more(case, monkeypatch):
    engine = Engine(case.lm, DRAFTERS["kangaroo"](case), Letters())
    steps, step = [], engine.step

    def spy(batch):
        steps.append(step(batch))
        return steps[-1]

    monkeypatch.setattr(engine, "step", spy)
    tokens = continuations(case)[0]
    stop = [f"<{tokens[fresh_place(tokens)]}>"]
    done = engine.generate(PROMPTS, NEW_TOKENS, HOT, stop=stop)
    taken = len(done[0].steps) - 1  # the first is the prefill
    assert 0 < taken < len(steps)
    for first, *_ in steps[taken:]:
        assert (first.tokens, first.accepted, first.drafted) == ([], 0, 0)


def test_a_row_that_stopped_makes_room_for_the_next(case):
    tokens = continuations(case)[0]
    stop = [f"<{tokens[fresh_place(tokens)]}>"]
    engine = Engine(case.lm, DRAFTERS["kangaroo"](case), Letters())
    one = engine.generate(PROMPTS, NEW_TOKENS, HOT, batch_size=1, stop=stop)
    alone = [
        engine.generate([prompt], NEW_TOKENS, HOT, seeds=[HOT.seed + i], stop=stop)[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    assert [g.tokens for g in one] == [g.tokens for g in alone]
