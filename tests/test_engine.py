"""A text ends where it must, step records add up, and a step waits for the device but once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers import (
    VOCABULARY,
    Scripted,
    adapter_for,
    adversary,
    oracle,
    random_prompts,
    tiny,
    tiny_model,
    vanilla_texts,
)
from test_conformance import DRAFTERS, Case
from torch.utils._python_dispatch import TorchDispatchMode

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import Engine
from kangaroo.errors import ConfigError, PromptError
from kangaroo.generation import Request
from kangaroo.model import LM
from kangaroo.sampling import Rule, Sampling

NEW_TOKENS = 16
PROMPTS = random_prompts(6, 1, 21)
HOT = Sampling(temperature=2.0, seed=11)


def case_for(lm: LM) -> Case:
    return Case(lm, adapter_for(lm), vanilla_texts(lm, PROMPTS, NEW_TOKENS, HOT))


@pytest.fixture(scope="module")
def case() -> Case:
    """By native code, which takes a third of the time."""
    return case_for(tiny().compile_for_decoding())


@pytest.fixture(scope="module")
def eager_case() -> Case:
    """By PyTorch's operators alone, so that each of them can be seen."""
    return case_for(tiny())


@cache
def full_context(length: int) -> tuple[Case, list[int]]:
    """A case whose one text fills the context, and its prompt of `length` tokens."""
    lm = tiny(max_position_embeddings=64).compile_for_decoding()
    (prompt,) = random_prompts(length)
    return Case(lm, adapter_for(lm), vanilla_texts(lm, [prompt], 64 - length)), prompt


@pytest.fixture
def ends_with(case):
    """Sets the tokens that end a text."""
    config = case.lm.hf.generation_config

    def set_eos(ids: int | list[int] | None) -> None:
        config.eos_token_id = ids

    yield set_eos
    config.eos_token_id = None


def continuations(case: Case) -> list[list[int]]:
    return [text[len(prompt) :] for prompt, text in zip(PROMPTS, case.texts, strict=True)]


def until(tokens: list[int], eos: set[int]) -> list[int]:
    """`tokens` up to and with the first that lies in `eos`."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:end]


# ---- length ------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_tokens", [1, 2, 5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_exactly_max_new_tokens_are_written(case, name, new_tokens):
    done = Engine(case.lm, DRAFTERS[name](case)).generate(PROMPTS, new_tokens, HOT)
    assert [g.tokens for g in done] == [c[:new_tokens] for c in continuations(case)]
    assert {g.finish for g in done} == {"length"}


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_have_their_own_limits(case, name):
    limits = [3, NEW_TOKENS, 1]
    requests = [
        Request(prompt, limit, seed=HOT.seed + i)
        for i, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True))
    ]
    engine = Engine(case.lm, DRAFTERS[name](case))
    done = dict(engine.completions(requests, HOT, batch_size=3))
    expected = [c[:limit] for c, limit in zip(continuations(case), limits, strict=True)]
    assert [done[i].tokens for i in range(3)] == expected


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("length", [45, 62, 63])
def test_a_text_may_fill_the_context_to_its_last_position(name, length):
    case, prompt = full_context(length)
    engine = Engine(case.lm, DRAFTERS[name](case), prefill_chunk=16)
    (done,) = engine.generate([prompt], 64 - length)
    assert prompt + done.tokens == case.texts[0]
    assert len(case.texts[0]) == case.lm.context


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


def fresh_place(tokens: list[int]) -> int:
    """A place from 2 on whose token did not occur before."""
    return next(i for i in range(2, len(tokens)) if tokens[i] not in tokens[:i])


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


class Letters:
    """Writes each token as `<number>`, and the tokens in `raw` as bytes of their own."""

    def __init__(self, raw: dict[int, bytes] | None = None):
        self.raw = raw or {}

    def decode(self, tokens: list[int]) -> str:
        parts = [self.raw.get(token, f"<{token}>".encode()) for token in tokens]
        return b"".join(parts).decode(errors="replace")


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


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, new_tokens, message",
    [
        ([], 5, "prompt is empty"),
        ([1, 2], 0, "max_new_tokens must be 1 or more, not 0"),
        ([1, 2], -3, "not -3"),
        ([1] * 60, 5, "60 tokens and 5 new ones.*context is 64.*at most 4 new"),
        ([1] * 64, 1, "64 tokens and 1 new ones.*context is 64.*at most 0 new"),
        ([1] * 70, 1, "70 tokens and 1 new ones.*context is 64.*at most 0 new"),
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


def test_stop_strings_without_a_tokenizer_are_refused(case):
    with pytest.raises(PromptError, match="tokenizer"):
        Engine(case.lm, Vanilla()).generate(PROMPTS, 4, stop=["x"])


def test_settings_that_cannot_work_are_refused_by_name(case):
    for size in (0, -5):
        with pytest.raises(ConfigError, match=f"prefill_chunk.*{size}"):
            Engine(case.lm, Vanilla(), prefill_chunk=size)
    with pytest.raises(ConfigError, match=r"batch_size.*-1"):
        Engine(case.lm, Vanilla()).generate(PROMPTS, 4, batch_size=-1)


def test_no_prompts_give_no_generations(case):
    assert Engine(case.lm, Vanilla()).generate([], 5) == []


# ---- rows that come and go ---------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_row_decodes_alone_in_a_batch_whose_other_rows_were_never_taken(case, name):
    engine = Engine(case.lm, DRAFTERS[name](case))
    batch = engine.open(4, 60, HOT)
    tokens = engine.admit(batch, 2, Request(PROMPTS[0], NEW_TOKENS, seed=HOT.seed)).tokens
    while len(tokens) < NEW_TOKENS:
        records = engine.step(batch)
        tokens += records[2].tokens
        assert all(
            (record.tokens, record.accepted, record.drafted) == ([], 0, 0)
            for row, record in enumerate(records)
            if row != 2
        )
    assert tokens == continuations(case)[0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_prompt_may_join_while_others_are_decoding(case, name):
    engine = Engine(case.lm, DRAFTERS[name](case), prefill_chunk=8)
    batch = engine.open(3, 60, HOT)
    written: list[list[int]] = [[], [], []]
    for row, prompt in enumerate(PROMPTS):
        request = Request(prompt, NEW_TOKENS, seed=HOT.seed + row)
        written[row] += engine.admit(batch, row, request).tokens
        for _ in range(2):
            for tokens, record in zip(written, engine.step(batch), strict=True):
                tokens += record.tokens
    while not all(batch.done):
        for tokens, record in zip(written, engine.step(batch), strict=True):
            tokens += record.tokens
    assert written == continuations(case)


@pytest.mark.parametrize("which", ["case", "eager_case"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_prompt_may_enter_in_parts_while_others_are_decoding(request, which, name):
    """The longest one, in a row that another text has used before."""
    case = request.getfixturevalue(which)
    engine = Engine(case.lm, DRAFTERS[name](case), prefill_chunk=2)
    batch, prompts = engine.open(2, 60, HOT), sorted(enumerate(PROMPTS), key=lambda p: len(p[1]))
    asked = [Request(prompt, NEW_TOKENS, seed=HOT.seed + i) for i, prompt in prompts]
    engine.admit(batch, 1, replace(asked[1], max_new_tokens=3))
    while not batch.done[1]:
        engine.step(batch)
    written = [engine.admit(batch, 0, replace(asked[0], max_new_tokens=40)).tokens, []]
    parts = engine.admitting(batch, 1, asked[-1])
    while not written[1]:
        try:
            next(parts)
        except StopIteration as ended:
            written[1] = ended.value.tokens
            break
        for tokens, record in zip(written, engine.step(batch), strict=True):
            tokens += record.tokens
    while not all(batch.done):
        for tokens, record in zip(written, engine.step(batch), strict=True):
            tokens += record.tokens
    assert written[0][:NEW_TOKENS] == continuations(case)[prompts[0][0]]
    assert len(written[0]) == 40 and written[1] == continuations(case)[prompts[-1][0]]


def test_a_prompt_that_is_given_up_halfway_leaves_its_row_free(case):
    engine = Engine(case.lm, DRAFTERS["kangaroo"](case), prefill_chunk=2)
    batch = engine.open(1, 60, HOT)
    parts = engine.admitting(batch, 0, Request(PROMPTS[-1], NEW_TOKENS))
    next(parts)
    parts.close()
    assert batch.done == [True] and not engine.step(batch)[0].tokens
    request = Request(PROMPTS[0], NEW_TOKENS, seed=HOT.seed)
    written = engine.admit(batch, 0, request).tokens
    while not batch.done[0]:
        written += engine.step(batch)[0].tokens
    assert written == continuations(case)[0]


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "hot"])
def test_a_prefill_in_chunks_changes_nothing(case, sampling):
    prompts = random_prompts(2, 64, 65)
    for drafter in (Vanilla(), DRAFTERS["kangaroo"](case)):
        whole = Engine(case.lm, drafter).generate(prompts, 8, sampling)
        for chunk in (7, 64):
            parts = Engine(case.lm, drafter, prefill_chunk=chunk).generate(prompts, 8, sampling)
            assert [g.tokens for g in parts] == [g.tokens for g in whole]


# ---- records and streams -----------------------------------------------------------------------


def right_every_third_missing(position: int) -> bool:
    return position % 3 > 0


def expected_records(length: int, new_tokens: int, steps: int) -> list[tuple[int, int, int]]:
    """(tokens, accepted, drafted) of each step of a drafter that is right by position alone."""
    records = [(1, 0, 0)]  # the prefill
    end = length + new_tokens
    length += 1
    while length < end:
        drafted = min(steps, end - length)
        accepted = 0
        while accepted < drafted and right_every_third_missing(length + accepted):
            accepted += 1
        written = min(accepted + 1, end - length)
        records.append((written, accepted, drafted))
        length += written
    return records


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_records_count_what_was_drafted_accepted_and_written(case, steps):
    drafter = Scripted(case.texts, right_every_third_missing, steps)
    done = Engine(case.lm, drafter).generate(PROMPTS, NEW_TOKENS, HOT)
    for prompt, generation in zip(PROMPTS, done, strict=True):
        counted = [(len(s.tokens), s.accepted, s.drafted) for s in generation.steps]
        assert counted == expected_records(len(prompt), NEW_TOKENS, steps)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_tokens_of_the_steps_are_the_text(case, name):
    done = Engine(case.lm, DRAFTERS[name](case)).generate(PROMPTS, NEW_TOKENS, HOT)
    for generation in done:
        assert [t for step in generation.steps for t in step.tokens] == generation.tokens
        assert all(s.accepted <= s.drafted for s in generation.steps)
        assert all(s.accepted <= len(s.tokens) <= s.accepted + 1 for s in generation.steps)
        assert 0 < generation.seconds < 60
        assert generation.steps[0].seconds == 0 < generation.prefill_seconds
        assert min(s.draft_seconds for s in generation.steps) >= 0
        assert min(s.verify_seconds for s in generation.steps[1:]) > 0


def test_wrong_drafts_cost_steps_and_right_ones_save_them(case):
    wrong = Engine(case.lm, adversary(case.texts)).generate(PROMPTS, NEW_TOKENS, HOT)
    right = Engine(case.lm, oracle(case.texts, steps=3)).generate(PROMPTS, NEW_TOKENS, HOT)
    assert [len(g.steps) for g in wrong] == [NEW_TOKENS] * 3
    assert [len(g.steps) for g in right] == [1 + -(-(NEW_TOKENS - 1) // 4)] * 3


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_stream_is_the_generation_token_by_token(case, name):
    engine = Engine(case.lm, DRAFTERS[name](case))
    streamed = list(engine.stream(PROMPTS[0], NEW_TOKENS, HOT))
    assert [token.id for token in streamed] == continuations(case)[0]


def test_a_stream_tells_drafted_tokens_from_the_targets_own(case):
    drafter = Scripted(case.texts, right_every_third_missing, steps=4)
    streamed = Engine(case.lm, drafter).stream(PROMPTS[0], NEW_TOKENS, HOT)
    length = len(PROMPTS[0])
    for position, token in enumerate(streamed, start=length):
        assert token.drafted == (position > length and right_every_third_missing(position))


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
    assert stream.generation.finish == "stop"
    assert stream.generation.steps


# ---- waiting for the device --------------------------------------------------------------------


class Syncs(TorchDispatchMode):
    """Counts what would make the host wait for a GPU."""

    NAMES = (
        "_local_scalar_dense",
        "nonzero",
        "is_nonzero",
        "masked_select",
        "equal",
        "unique",
        "_unique2",
        "bincount",
        "repeat_interleave",
    )

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen: Counter[str] = Counter()
        # on a CPU tensor these read memory without an operator
        for name in ("tolist", "cpu", "numpy", "__array__"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(name))

    def _counted(self, name):
        original = getattr(torch.Tensor, name)

        def method(tensor, *args, **kwargs):
            self.seen[name] += 1
            return original(tensor, *args, **kwargs)

        return method

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.seen[name] += 1
        if name in ("index", "index_put_", "index_put"):  # a mask as index hides a nonzero
            indices = args[1]
            self.seen["mask index"] += sum(
                index is not None and index.dtype == torch.bool for index in indices
            )
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.seen.values())


@pytest.mark.parametrize(
    "code",
    [
        lambda x: x[0].item(),
        lambda x: bool(x.any()),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: [1, 2, 3][x[1]],
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        lambda x: x.__setitem__(x > 1, 0) if x[0] else None,
        lambda x: torch.where(x > 1),
    ],
)
def test_the_counter_of_syncs_sees_them(monkeypatch, code):
    x = torch.arange(3)
    with Syncs(monkeypatch) as syncs:
        code(x)
    assert syncs.total >= 1


@pytest.mark.parametrize("sampling", [Sampling(), HOT, replace(HOT, top_k=5, top_p=0.9)], ids=str)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name, threshold", [("vanilla", 0), ("kangaroo", 0), ("kangaroo", 0.6)])
def test_no_host_sync_in_a_step_beyond_those_the_design_names(
    eager_case, monkeypatch, name, threshold, rows, sampling
):
    """One copy of the new tokens, and one bool a drafted token, the last aside, for a threshold."""
    steps = 4
    drafter = (
        Vanilla()
        if name == "vanilla"
        else Kangaroo(eager_case.lm, eager_case.adapter, steps=steps, threshold=threshold)
    )
    engine = Engine(eager_case.lm, drafter)
    batch = engine.open(rows, 60, sampling)
    for row, prompt in enumerate(random_prompts(3, 5, 1, 9)[:rows]):
        engine.admit(batch, row, Request(prompt, 30, seed=row))
    for _ in range(5):
        with Syncs(monkeypatch) as syncs:
            records = engine.step(batch)
        monkeypatch.undo()
        drafted = max(record.drafted for record in records)
        asked = min(drafted, steps - 1) if threshold else 0
        assert syncs.seen["tolist"] == 1
        assert syncs.total == 1 + asked, syncs.seen


@pytest.mark.parametrize(
    "name", ["prompt-lookup-reference", "rest-tree", "lookahead-tree", "lookahead-tree-small"]
)
def test_drafts_from_text_or_from_the_pool_wait_for_no_device(eager_case, monkeypatch, name):
    engine = Engine(eager_case.lm, DRAFTERS[name](eager_case))
    batch = engine.open(3, 90, HOT)
    for row, prompt in enumerate(PROMPTS):
        engine.admit(batch, row, Request(prompt, NEW_TOKENS, seed=HOT.seed + row))
    for _ in range(4):
        with Syncs(monkeypatch) as syncs:
            engine.step(batch)
        monkeypatch.undo()
        assert syncs.total == 1, syncs.seen


def test_a_tree_step_waits_for_the_device_but_once(eager_case, monkeypatch):
    """The drafter aside: the engine moves accepted paths without asking how long they are."""
    engine = Engine(eager_case.lm, DRAFTERS["tree"](eager_case))
    batch = engine.open(3, 60, HOT)
    for row, prompt in enumerate(PROMPTS):
        engine.admit(batch, row, Request(prompt, NEW_TOKENS, seed=HOT.seed + row))
    for _ in range(3):
        draft = engine.drafter.propose(batch)
        monkeypatch.setattr(engine.drafter, "propose", lambda batch, draft=draft: draft)
        monkeypatch.setattr(engine.drafter, "observe", lambda *args: None)
        with Syncs(monkeypatch) as syncs:
            engine.step(batch)
        monkeypatch.undo()
        assert syncs.total == 1, syncs.seen


# ---- other number formats ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_decodes_to_the_full_length(dtype):
    """Equal texts are promised in float32 alone: near ties may fall either way here."""
    lm = LM(tiny_model(dtype=dtype))
    adapter = adapter_for(lm).to(dtype)
    for drafter in (Vanilla(), Kangaroo(lm, adapter, steps=4, threshold=0.3)):
        done = Engine(lm, drafter, prefill_chunk=8).generate(PROMPTS, NEW_TOKENS, HOT)
        assert [len(g.tokens) for g in done] == [NEW_TOKENS] * 3
        assert all(0 <= t < VOCABULARY for g in done for t in g.tokens)


def test_a_second_stream_on_one_engine_is_refused_not_mixed_up():
    lm = tiny()
    engine = Engine(lm, Kangaroo(lm, adapter_for(lm)))
    first, second = (engine.stream(prompt, 8) for prompt in random_prompts(4, 9))
    assert len(list(second)) == 8
    with pytest.raises(ConfigError, match="one batch, or one stream, at a time"):
        list(first.tokens)


def test_streams_in_one_batch_take_its_row_one_after_another():
    lm, (first, second) = tiny(), random_prompts(4, 9)
    engine = Engine(lm, Kangaroo(lm, adapter_for(lm)), reuse=True)
    batch = engine.open(1, 40, Sampling())
    left = engine.stream(first, 8, batch=batch)
    told = engine.stream(second, 8, batch=batch)
    assert second + [token.id for token in told] == vanilla_texts(lm, [second], 8)[0]
    with pytest.raises(ConfigError, match="one batch, or one stream, at a time"):
        list(left.tokens)
    with pytest.raises(ConfigError, match=r"opened with .*temperature=2.* 1 rows and"):
        engine.stream(first, 8, HOT, batch=batch)
    engine.open(1, 40, Sampling())
    with pytest.raises(ConfigError, match="one batch, or one stream, at a time"):
        engine.stream(first, 8, batch=batch)


def test_a_token_outside_the_vocabulary_is_refused():
    with pytest.raises(PromptError, match="outside the model's vocabulary of 64"):
        Engine(tiny(), Vanilla()).generate([[1, 64]], 4)


@pytest.mark.parametrize("native", [False, True])
def test_a_row_is_drawn_by_its_own_settings_while_others_come_and_go(native):
    lm = tiny().compile_for_decoding() if native else tiny()
    drafter = Kangaroo(lm, adapter_for(lm), steps=3, threshold=0)
    prompts = random_prompts(5, 9, 6, 4, 7)
    own = [HOT, Sampling(), replace(HOT, top_k=3, seed=5), None, replace(HOT, top_p=0.5, seed=8)]
    requests = [
        Request(prompt, 6 + 3 * i, seed=(how or HOT).seed, sampling=how)
        for i, (prompt, how) in enumerate(zip(prompts, own, strict=True))
    ]
    done = dict(Engine(lm, drafter).completions(requests, HOT, batch_size=2))
    for i, (request, how) in enumerate(zip(requests, own, strict=True)):
        (alone,) = vanilla_texts(lm, [prompts[i]], request.max_new_tokens, how or HOT)
        assert prompts[i] + done[i].tokens == alone


def test_a_request_has_no_sampling_of_its_own_under_rejection():
    lm = tiny()
    engine = Engine(lm, Vanilla())
    batch = engine.open(1, 20, Sampling(temperature=1, rule=Rule.rejection))
    with pytest.raises(ConfigError, match=r"under sampling\.rule=rejection cannot have sampling"):
        engine.admit(batch, 0, Request([1, 2], 3, sampling=HOT))
