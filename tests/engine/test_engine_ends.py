"""A text ends where it must: with its first EOS, or with the token that completes a stop string."""

import pytest
from cases import DRAFTERS, with_each
from engine_cases import HOT, NEW_TOKENS, PROMPTS, Letters, continuations, fresh_place
from helpers import oracle

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request


@pytest.fixture
def ends_with(case, monkeypatch):
    config = case.lm.hf.generation_config
    return lambda *ids: monkeypatch.setattr(config, "eos_token_id", list(ids))


@pytest.fixture(scope="module")
def first(case) -> tuple[list[int], int]:
    tokens = continuations(case)[0]
    return tokens, fresh_place(tokens)


def until(tokens: list[int], eos: set[int]) -> list[int]:
    """`tokens` up to and with the first that lies in `eos`."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:end]


@pytest.mark.parametrize("name, place", with_each(0, 1, 2, 5))
def test_a_text_ends_with_its_first_eos(case, ends_with, name, place):
    """Of three rows, which end at different times; `place` is where the EOS lies in the first."""
    eos = {continuations(case)[0][place], continuations(case)[1][2]}
    ends_with(*sorted(eos))
    done = Engine(case.lm, DRAFTERS[name](case)).generate(PROMPTS, NEW_TOKENS, HOT)
    for generation, unbroken in zip(done, continuations(case), strict=True):
        assert generation.tokens == until(unbroken, eos)
        assert generation.finish == ("eos" if eos & set(unbroken) else "length")
        assert sum(len(step.tokens) for step in generation.steps) == len(generation.tokens)


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


def test_an_eos_may_come_in_a_draft_as_the_bonus_token_at_the_limit_or_beyond(
    case, ends_with, first
):
    tokens, place = first
    ends_with(tokens[place])

    def decoded(steps: int, new_tokens: int = NEW_TOKENS):
        engine = Engine(case.lm, oracle(case.texts, steps=steps))
        return engine.generate(PROMPTS[:1], new_tokens, HOT)[0]

    done = decoded(place + 3)
    (first_step, step) = done.steps
    assert done.tokens == tokens[: place + 1] and first_step.tokens == tokens[:1]
    assert (step.drafted, step.accepted) == (place + 3, place)  # cut tokens do not count
    done = decoded(place - 1)
    assert done.tokens == tokens[: place + 1]
    assert [step.accepted for step in done.steps] == [0, place - 1]
    done = decoded(place + 3, new_tokens=place)
    assert done.tokens == tokens[:place] and done.finish == "length"
    assert decoded(place + 3, new_tokens=place + 1).finish == "eos"


@pytest.mark.parametrize("name, width", with_each(1, 3))
def test_a_text_ends_with_the_token_that_completes_a_stop_string(case, first, name, width):
    (tokens, place), letters = first, Letters()
    stop = letters.decode(tokens[place + 1 - width : place + 1])[1:]  # from inside a token on
    engine = Engine(case.lm, DRAFTERS[name](case), letters)
    done = engine.generate(PROMPTS, NEW_TOKENS, HOT, stop=["never", stop])
    assert done[0].tokens == tokens[: place + 1] and done[0].finish == "stop"
    for generation, unbroken in zip(done, continuations(case), strict=True):
        ends = [i for i in range(1, NEW_TOKENS + 1) if stop in letters.decode(unbroken[:i])]
        assert generation.tokens == unbroken[: min([*ends, NEW_TOKENS])]
        assert generation.tokens == [t for step in generation.steps for t in step.tokens]


class Stripping(Letters):
    """As SentencePiece tokenizers: a window of just the stop string's tokens would hide it."""

    def decode(self, tokens):
        return super().decode(tokens).removeprefix(" ")


def test_a_stop_string_inside_an_accepted_draft_cuts_the_rest(case, first):
    tokens, place = first
    engine = Engine(case.lm, oracle(case.texts, steps=place + 3), Letters())
    (done,) = engine.generate(PROMPTS[:1], NEW_TOKENS, HOT, stop=[f"<{tokens[place]}>"])
    assert done.tokens == tokens[: place + 1]
    assert (done.steps[-1].accepted, len(done.steps[-1].tokens)) == (place, place)


def test_a_stop_string_may_be_of_parts_of_a_character_or_a_space_but_not_begin_in_the_prompt(
    case, first
):
    tokens, place = first
    raw = {tokens[place - 1]: b"\xc3", tokens[place]: b"\xa9"}
    for letters, stop in (Letters(raw), "é"), (Stripping({tokens[place]: b" "}), " "):
        for name in ("vanilla", "oracle"):
            engine = Engine(case.lm, DRAFTERS[name](case), letters)
            (done,) = engine.generate(PROMPTS[:1], NEW_TOKENS, HOT, stop=[stop])
            assert done.tokens == tokens[: place + 1]
    stop = Letters().decode([PROMPTS[0][-1], tokens[0]])
    (done,) = Engine(case.lm, Vanilla(), Letters()).generate(PROMPTS[:1], 4, HOT, stop=[stop])
    assert len(done.tokens) == 4
