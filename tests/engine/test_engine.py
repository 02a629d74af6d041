"""Texts are as long as they may be, rows come and go, and step records add up."""

from dataclasses import replace
from functools import cache
from itertools import cycle

import pytest
from cases import DRAFTERS, Case, with_each
from engine_cases import HOT, NEW_TOKENS, PROMPTS, Letters, continuations, fresh_place
from helpers import Scripted, adapter_for, oracle, random_prompts, texts_by, tiny, vanilla_texts

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.batch import Batch
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.utils.errors import ConfigError, PromptError


@cache
def full_context(length: int) -> tuple[Case, list[list[int]], Sampling]:
    """A case whose one text fills the context, its prompt of so many tokens, and the sampling."""
    lm = tiny(max_position_embeddings=64).compile_for_decoding()
    prompts, how = random_prompts(length), HOT if length == 62 else Sampling()
    return Case(lm, adapter_for(lm), vanilla_texts(lm, prompts, 64 - length, how)), prompts, how


def requests_of(*limits: int) -> list[Request]:
    pairs = enumerate(zip(PROMPTS, limits, strict=False))
    return [Request(prompt, limit, seed=HOT.seed + i) for i, (prompt, limit) in pairs]


def step(engine: Engine, batch: Batch, written: list[list[int]]) -> None:
    for tokens, record in zip(written, engine.step(batch), strict=True):
        tokens += record.tokens


# ---- length ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_each_row_writes_its_own_number_of_tokens_which_are_those_of_its_steps(case, name):
    for limits in ([3, NEW_TOKENS, 1], [2, 5, NEW_TOKENS]):
        engine = Engine(case.lm, DRAFTERS[name](case))
        done = dict(engine.completions(requests_of(*limits), HOT, batch_size=3))
        for i, limit in enumerate(limits):
            generation, (first, *steps) = done[i], done[i].steps
            assert generation.tokens == continuations(case)[i][:limit]
            assert [t for s in (first, *steps) for t in s.tokens] == generation.tokens
            assert all(s.accepted <= len(s.tokens) <= s.accepted + 1 for s in (first, *steps))
            assert all(s.accepted <= s.drafted and s.verify_seconds > 0 for s in steps)
            assert first.seconds == 0 < generation.prefill_seconds <= generation.seconds < 60
            assert generation.finish == "length"


@pytest.mark.parametrize("name, length", with_each(45, 62, 63))
def test_a_text_may_fill_the_context_to_its_last_position(name, length):
    case, prompts, how = full_context(length)
    engine = Engine(case.lm, DRAFTERS[name](case), prefill_chunk=16)
    assert texts_by(engine, prompts, 64 - length, how) == case.texts
    assert len(case.texts[0]) == case.lm.context


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, new_tokens, message",
    [
        ([], 5, "prompt is empty"),
        ([1, 2], 0, "max_new_tokens must be 1 or more, not 0"),
        ([1] * 60, 5, "60 tokens and 5 new ones.*context is 64.*at most 4 new"),
        ([1] * 64, 1, "64 tokens and 1 new ones.*context is 64.*the prompt by 1 or more"),
        ([1] * 70, 1, "70 tokens and 1 new ones.*context is 64.*the prompt by 7 or more"),
        ([1, 64], 4, "outside the model's vocabulary of 64"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_with_its_numbers(prompt, new_tokens, message):
    engine = Engine(tiny(max_position_embeddings=64), Vanilla())
    with pytest.raises(PromptError, match=message):
        engine.generate([[1, 2, 3], prompt], new_tokens)
    with pytest.raises(PromptError, match=message):
        list(engine.stream(prompt, new_tokens))


def test_a_request_too_long_for_its_batch_is_refused_with_its_numbers(case):
    for drafter in (Vanilla(), DRAFTERS["kangaroo"](case)):
        engine = Engine(case.lm, drafter)
        batch = engine.open(1, 20, Sampling())
        engine.admit(batch, 0, Request([1] * 15, 5))
        with pytest.raises(PromptError, match=r"texts of 20 tokens.*has 15 and 6 new"):
            engine.admit(batch, 0, Request([1] * 15, 6))


def test_settings_that_cannot_work_are_refused_by_name(case):
    with pytest.raises(ConfigError, match=r"prefill_chunk.*0"):
        Engine(case.lm, Vanilla(), prefill_chunk=0)
    with pytest.raises(ConfigError, match=r"batch_size.*-1"):
        Engine(case.lm, Vanilla()).generate(PROMPTS, 4, batch_size=-1)
    with pytest.raises(PromptError, match="tokenizer"):
        Engine(case.lm, Vanilla()).generate(PROMPTS, 4, stop=["x"])
    for seed in (2**63, -(2**63) - 1):
        with pytest.raises(ConfigError, match=f"seed={seed} must be .* at most {2**63 - 1}"):
            Request([5], 1, seed)
    engine = Engine(case.lm, Vanilla())
    batch = engine.open(1, 20, Sampling(temperature=1, rule=Rule.rejection))
    with pytest.raises(ConfigError, match=r"under sampling\.rule=rejection cannot have sampling"):
        engine.admit(batch, 0, Request([1, 2], 3, sampling=HOT))
    assert engine.generate([], 5) == []


# ---- rows that come and go ---------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_decodes_alone_in_a_batch_whose_other_rows_were_never_taken(case, name):
    engine = Engine(case.lm, DRAFTERS[name](case))
    batch = engine.open(4, 60, HOT)
    tokens = engine.admit(batch, 2, requests_of(NEW_TOKENS)[0]).tokens
    while len(tokens) < NEW_TOKENS:
        records = engine.step(batch)
        tokens += records.pop(2).tokens
        assert {(len(r.tokens), r.accepted, r.drafted) for r in records} == {(0, 0, 0)}
    assert tokens == continuations(case)[0]


@pytest.mark.parametrize("name, which", list(zip(DRAFTERS, cycle(["case", "eager_case"]))))
def test_a_prompt_may_enter_in_parts_while_others_are_decoding(request, which, name):
    """The longest one, in a row that another text has used before."""
    case = request.getfixturevalue(which)
    engine = Engine(case.lm, DRAFTERS[name](case), prefill_chunk=2)
    batch, requests = engine.open(2, 60, HOT), requests_of(*[NEW_TOKENS] * 3)
    engine.admit(batch, 1, replace(requests[0], max_new_tokens=3))
    while not batch.done[1]:
        engine.step(batch)
    written = [engine.admit(batch, 0, replace(requests[1], max_new_tokens=40)).tokens, []]
    parts = engine.prefill_chunks(batch, 1, requests[2])
    while not written[1]:
        if (entered := next(parts)) is None:
            step(engine, batch, written)
        else:
            written[1] = entered.tokens
    while not all(batch.done):
        step(engine, batch, written)
    assert written[0][:NEW_TOKENS] == continuations(case)[1]
    assert len(written[0]) == 40 and written[1] == continuations(case)[2]


@pytest.mark.parametrize("name, count", with_each(1, NEW_TOKENS - 1))
def test_a_text_goes_on_in_another_batch_as_it_would_have(case, name, count):
    """To its limit, which the tokens that were written count for; so do they for stop strings."""
    texts, requests = continuations(case), requests_of(*[NEW_TOKENS] * 3)
    begun = [replace(r, written=text[:count]) for r, text in zip(requests, texts, strict=True)]
    engine = Engine(case.lm, DRAFTERS[name](case), Letters())
    done = dict(engine.completions(begun, HOT, batch_size=2))
    assert [done[i].tokens for i in range(len(begun))] == texts
    assert {generation.finish for generation in done.values()} == {"length"}
    stop = Letters().decode(texts[0][count - 1 : count + 1])
    (stopped,) = dict(engine.completions([replace(begun[0], stop=[stop])], HOT, 1)).values()
    assert (stopped.tokens, stopped.finish) == (texts[0][: count + 1], "stop")


def test_a_prompt_that_is_given_up_halfway_leaves_its_row_free(case):
    engine = Engine(case.lm, DRAFTERS["kangaroo"](case), prefill_chunk=2)
    batch = engine.open(1, 60, HOT)
    parts = engine.prefill_chunks(batch, 0, Request(PROMPTS[-1], NEW_TOKENS))
    next(parts)
    parts.close()
    assert batch.done == [True] and not engine.step(batch)[0].tokens
    written = [engine.admit(batch, 0, requests_of(NEW_TOKENS)[0]).tokens]
    while not all(batch.done):
        step(engine, batch, written)
    assert written == continuations(case)[:1]


# ---- records and streams -----------------------------------------------------------------------


def test_a_stream_is_the_generation_and_tells_drafted_tokens_from_the_targets_own(case):
    drafter = Scripted(case.texts, lambda position: position % 3 > 0, steps=4)
    streamed = list(Engine(case.lm, drafter).stream(PROMPTS[0], NEW_TOKENS, HOT))
    assert [token.id for token in streamed] == continuations(case)[0]
    length = len(PROMPTS[0])
    for position, token in enumerate(streamed, start=length):
        assert token.drafted == (position > length and position % 3 > 0)


def test_a_stream_stops_at_a_stop_string_and_its_generation_grows_along(case):
    tokens = continuations(case)[0]
    place = fresh_place(tokens)
    engine = Engine(case.lm, oracle(case.texts), Letters())
    stream = engine.stream(PROMPTS[0], NEW_TOKENS, HOT, stop=[f"<{tokens[place]}>"])
    streamed = []
    for token in stream:
        streamed.append(token.id)
        assert stream.generation.tokens[: len(streamed)] == streamed
    assert streamed == stream.generation.tokens == tokens[: place + 1]
    assert stream.generation.finish == "stop" and stream.generation.steps


def test_streams_take_turns_and_one_whose_place_is_taken_is_refused_not_mixed_up():
    lm, (first, second) = tiny(), random_prompts(4, 9)
    engine = Engine(lm, Kangaroo(lm, adapter_for(lm)), prefix_cache=True)
    left, other = (engine.stream(prompt, 8) for prompt in (first, second))
    assert len(list(other)) == 8
    with pytest.raises(ConfigError, match="one batch, or one stream, at a time"):
        list(left.tokens)
    batch = engine.open(1, 40, Sampling())  # in one batch they take its row one after another
    left, other = (engine.stream(prompt, 8, batch=batch) for prompt in (first, second))
    assert second + [token.id for token in other] == vanilla_texts(lm, [second], 8)[0]
    with pytest.raises(ConfigError, match="one batch, or one stream, at a time"):
        list(left.tokens)
    with pytest.raises(ConfigError, match=r"opened with .*temperature=2.* 1 rows and"):
        engine.stream(first, 8, HOT, batch=batch)
    engine.open(1, 40, Sampling())
    with pytest.raises(ConfigError, match="one batch, or one stream, at a time"):
        engine.stream(first, 8, batch=batch)
