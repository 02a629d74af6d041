"""Texts are as long as they may be, rows come and go, step records add up, and a text ends where it
must: with its first EOS, or with the token that completes a stop string."""

from dataclasses import replace
from functools import cache
from itertools import cycle

import helpers
import pytest
from cases import DRAFTERS, KINDS, Case, with_each
from engine_cases import HOT, NEW_TOKENS, PROMPTS, Letters, continuations, fresh_place
from helpers import Scripted, adapter_for, oracle, random_prompts, texts_by, tiny, vanilla_texts

from kangaroo import ConfigError, PromptError, Rule, Sampling
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.session import Prompt, Session


@cache
def full_context(length: int) -> tuple[Case, list[list[int]], Sampling]:
    """A case whose one text fills the context, its prompt of so many tokens, and the sampling."""
    lm = tiny(max_position_embeddings=64).compile_for_decoding()
    prompts, how = random_prompts(length), HOT if length == 62 else Sampling()
    return Case(lm, adapter_for(lm), vanilla_texts(lm, prompts, 64 - length, how)), prompts, how


def requests_of(*limits: int) -> list[Request]:
    pairs = enumerate(zip(PROMPTS, limits, strict=False))
    return [Request(prompt, limit, seed=HOT.seed + i) for i, (prompt, limit) in pairs]


def step(session: Session, written: list[list[int]]) -> None:
    for tokens, record in zip(written, session.step(), strict=True):
        tokens += record.tokens


@pytest.mark.parametrize("name", KINDS)
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


@pytest.mark.parametrize("name", KINDS)
def test_a_rule_that_needs_probabilities_is_refused_where_there_are_none(name, case):
    engine = Engine(case.lm, DRAFTERS[name](case))
    sampling = Sampling(temperature=1, rule=Rule.rejection)
    if engine.drafter.keeps_probs or name == "vanilla":
        engine.generate(PROMPTS, 8, sampling)
    else:
        assert "tree" in name or name.split("-")[0] not in "kangaroo draft_model layerskip".split()
        kind = type(engine.drafter).__name__
        with pytest.raises(ConfigError, match=f"rule=rejection needs .* and {kind} keeps"):
            engine.generate(PROMPTS, 8, sampling)


@pytest.mark.parametrize("name, length", with_each(45, 62, 63))
def test_a_text_may_fill_the_context_to_its_last_position(name, length):
    case, prompts, how = full_context(length)
    engine = Engine(case.lm, DRAFTERS[name](case), prefill_chunk=16)
    assert texts_by(engine, prompts, 64 - length, how) == case.texts
    assert len(case.texts[0]) == case.lm.context


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
    for drafter in (Vanilla(), DRAFTERS["kangaroo"](case)):
        engine = Engine(case.lm, drafter)
        session = engine.open(1, 20, Sampling(temperature=1, rule=Rule.rejection))
        session.admit(0, Request([1] * 15, 5))
        with pytest.raises(PromptError, match=r"15 tokens and 6 new.*texts of 20\."):
            session.admit(0, Request([1] * 15, 6))
        with pytest.raises(ConfigError, match=r"own sampling in a batch with .*rejection"):
            session.admit(0, Request([1, 2], 3, sampling=HOT))
        assert engine.generate([], 5) == []


@pytest.mark.parametrize("name, which", list(zip(KINDS, cycle(["case", "case", "eager_case"]))))
def test_a_prompt_may_enter_in_parts_while_others_are_decoding(request, which, name):
    """The longest one, in a row that another text has used before, beside rows never taken."""
    case = request.getfixturevalue(which)
    engine = Engine(case.lm, DRAFTERS[name](case), prefill_chunk=2)
    session, requests = engine.open(2, 60, HOT), requests_of(*[NEW_TOKENS] * 3)
    batch = session.batch
    before = session.admit(1, replace(requests[0], max_new_tokens=6)).tokens
    while not batch.done[1]:
        never_taken, record = session.step()
        before += record.tokens
        assert not (never_taken.tokens or never_taken.accepted or never_taken.drafted)
    assert before == continuations(case)[0][:6]
    written = [session.admit(0, replace(requests[1], max_new_tokens=40)).tokens, []]
    parts = Prompt(session, 1, requests[2])
    while not written[1]:
        if (entered := parts.advance()) is None:
            step(session, written)
        else:
            written[1] = entered.tokens
    while not all(batch.done):
        step(session, written)
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
    engine = Engine(lm, helpers.chain_of(lm, adapter_for(lm)), prefix_cache=True)
    left, other = (engine.stream(prompt, 8) for prompt in (first, second))
    assert len(list(other)) == 8
    with pytest.raises(ConfigError, match="one batch, or one stream, at a time"):
        list(left.tokens)
    session = engine.open(1, 40, Sampling())  # in one session they take its row one after another
    left, other = (session.stream(Request(prompt, 8)) for prompt in (first, second))
    assert second + [token.id for token in other] == vanilla_texts(lm, [second], 8)[0]
    with pytest.raises(ConfigError, match="one batch, or one stream, at a time"):
        list(left.tokens)
    engine.open(1, 40, Sampling())
    with pytest.raises(ConfigError, match="one batch, or one stream, at a time"):
        session.stream(Request(first, 8))


def test_a_row_whose_shared_prefix_was_not_copied_whole_is_no_prefix_of_others(monkeypatch):
    lm, (first, second) = tiny(), random_prompts(20, 30)
    engine = Engine(lm, helpers.chain_of(lm, adapter_for(lm)), prefix_cache=True)
    session = engine.open(2, 60, Sampling())
    for row, prompt in enumerate((first, second)):
        session.admit(row, Request(prompt, 1))
    monkeypatch.setattr(engine.drafter, "copy_prefix", None)
    with pytest.raises(TypeError):
        session.admit(1, Request([*first[:15], *second], 4))
    monkeypatch.undo()
    done = session.admit(1, Request(second, 1))
    assert done.reused == 0 and second + done.tokens == vanilla_texts(lm, [second], 1)[0]


@pytest.fixture
def ends_with(case, monkeypatch):
    return lambda *ids: monkeypatch.setattr(case.lm.hf.generation_config, "eos_token_id", list(ids))


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
    """Of three rows, which end at different times; `place` is where the EOS lies in the first: for
    the oracle 0 is the prefill's token, 1 and 2 lie in a draft, 5 is the bonus token."""
    eos = {continuations(case)[0][place], continuations(case)[1][2]}
    ends_with(*sorted(eos))
    done = Engine(case.lm, DRAFTERS[name](case)).generate(PROMPTS, NEW_TOKENS, HOT)
    for generation, unbroken in zip(done, continuations(case), strict=True):
        assert generation.tokens == until(unbroken, eos)
        assert generation.finish == ("eos" if eos & set(unbroken) else "length")
        assert generation.tokens == [t for step in generation.steps for t in step.tokens]
        assert all(s.accepted <= len(s.tokens) for s in generation.steps)  # cut tokens do not count


@pytest.mark.parametrize("name", ["kangaroo", "prompt-lookup", "medusa"])
def test_a_request_may_ignore_eos_while_others_in_the_batch_end_with_it(case, ends_with, name):
    eos = continuations(case)[0][2]
    ends_with(eos)
    engine = Engine(case.lm, DRAFTERS[name](case))
    for ignoring in (0, 1):  # a row keeps nothing of the request before
        request = Request(PROMPTS[0], NEW_TOKENS, seed=HOT.seed)
        requests = [replace(request, ignore_eos=row == ignoring) for row in range(2)]
        done = dict(engine.completions(requests, HOT, batch_size=2))
        assert done[ignoring].tokens == continuations(case)[0]
        assert done[1 - ignoring].tokens == until(continuations(case)[0], {eos})
        assert (done[ignoring].finish, done[1 - ignoring].finish) == ("length", "eos")


@pytest.mark.parametrize("beyond, finish", [(0, "length"), (1, "eos")])
def test_an_eos_in_a_draft_may_lie_at_the_limit_or_beyond(case, ends_with, first, beyond, finish):
    tokens, place = first
    ends_with(tokens[place])
    engine = Engine(case.lm, oracle(case.texts, steps=place + 3))
    (done,) = engine.generate(PROMPTS[:1], place + beyond, HOT)
    assert (done.tokens, done.finish) == (tokens[: place + beyond], finish)


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
        assert all(s.accepted <= len(s.tokens) for s in generation.steps)


class Stripping(Letters):
    """As SentencePiece tokenizers: a window of just the stop string's tokens would hide it."""

    def decode(self, tokens, **options):
        return super().decode(tokens).removeprefix(" ")


def test_a_stop_string_may_be_parts_of_a_character_or_space_but_not_begin_in_a_prompt(case, first):
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
