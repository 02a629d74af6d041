"""A prompt that begins like the text before it in its row is read from where it differs, and
nothing else changes: neither what is written nor what is drafted."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
from cases import DRAFTERS, METHODS, SAMPLINGS, SCRIPTED, Case, lm_of
from helpers import adapter_for, random_prompts, vanilla_texts

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling

LONGEST = 160
CHUNK = 16


@dataclass
class Turn:
    """A prompt, how many tokens follow, all of it, and how many of the prompt's the row has."""

    prompt: list[int]
    new_tokens: int
    text: list[int]
    known: int


def talk(family: str, sampling: Sampling, first: list[int], lengths: list[int]) -> list[Turn]:
    """A conversation: each prompt is what was written, and more; then one that leaves the text in
    its middle, one that is the same again, one that has nothing of it, and a short one of it."""
    more = random_prompts(*[3 + 5 * i for i in range(len(lengths))], seed=sum(first))
    turns: list[Turn] = []
    prompt = first
    for i, length in enumerate(lengths):
        (text,) = vanilla_texts(lm_of(family), [prompt], length, sampling)
        turns.append(Turn(prompt, length, text, 0))
        left = text[: len(text) // 2] + more[i]
        following = text + more[i], text + more[i], left, prompt, more[i]
        prompt = following[i] if i < len(following) else more[4][:-4]
    for before, turn in pairwise(turns):
        most = min(len(before.text) - 2, len(turn.prompt) - 1)
        pairs = zip(before.text[:most], turn.prompt, strict=False)
        turn.known = next((i for i, (was, now) in enumerate(pairs) if was != now), most)
    return turns


@cache
def talks(family: str, sampling: str) -> list[list[Turn]]:
    """Of two rows, which end their turns at different times."""
    first = random_prompts(9, 40, seed=7)
    lengths = [[4, 11, 9, 2, 1, 6, 5], [13, 5, 2, 17, 7, 1, 3]]
    how = SAMPLINGS[sampling]
    return [talk(family, how, *row) for row in zip(first, lengths, strict=True)]


def converse(engine: Engine, talks: list[list[Turn]], sampling: Sampling) -> list[list[Generation]]:
    """What was written in each row's turns; a row begins its next one as soon as one has ended."""
    done: list[list[Generation]] = [[] for _ in talks]
    turns = [
        [Request(turn.prompt, turn.new_tokens, sampling.seed) for turn in row] for row in talks
    ]

    def following(row: int, generation: Generation) -> Request | None:
        done[row].append(generation)
        return next(iter(turns[row][len(done[row]) :]), None)

    first = [row[0] for row in turns]
    list(engine.completions(first, sampling, len(talks), after=following, longest=LONGEST))
    return done


def drafts(done: list[list[Generation]]) -> list:
    return [[[(s.drafted, s.accepted) for s in g.steps] for g in row] for row in done]


def reuses(engine: Engine) -> bool:
    return engine.prefix_cache and engine.stepper.supports_prefix_reuse


def check(drafter: str, family: str, sampling: str) -> None:
    lm, asked = lm_of(family), talks(family, sampling)
    case = Case(lm, adapter_for(lm), [turn.text for row in asked for turn in row])
    found = {}
    for prefix_cache in (False, True):
        engine = Engine(lm, DRAFTERS[drafter](case), prefill_chunk=CHUNK, prefix_cache=prefix_cache)
        done = converse(engine, asked, SAMPLINGS[sampling])
        for row, turns in zip(done, asked, strict=True):
            for said, turn in zip(row, turns, strict=True):
                assert turn.prompt + said.tokens == turn.text
                assert said.reused == turn.known * reuses(engine)
        found[prefix_cache] = drafts(done)
    assert found[True] == found[False]


OWN = [name for name in DRAFTERS if name not in SCRIPTED]
TURNS = ["llama-compiled", "llama", "qwen3-compiled", "llama-graphs"]
FAST = [name for name in METHODS if name in OWN]  # the slow test has all, in every sampling


def share(engine: Engine, sampling: Sampling) -> tuple[list[tuple[list[int], Generation]], int]:
    """Texts that begin like those of other rows: of one that has ended; of a prompt that was just
    read, and of one that was written to; of all that another row is writing. Each with its prompt,
    in rows that had other texts. And how long the longest text is that the last one begins like."""
    (prompt, other, more) = random_prompts(37, 20, 9, seed=11)
    batch, said = engine.open(4, LONGEST, sampling), []
    running: dict[int, tuple[Request, Generation]] = {}

    def admit(row: int, prompt: list[int], new_tokens: int) -> Generation:
        request = Request(prompt, new_tokens, sampling.seed)
        running[row] = request, engine.admit(batch, row, request)
        said.append((prompt, running[row][1]))
        return running[row][1]

    def step(count: int) -> None:
        for _ in range(count):
            records = engine.step(batch)
            for row, (request, generation) in running.items():
                engine.record(batch, row, records[row], request, generation)

    for row in (1, 2, 3):
        admit(row, other[row:], 1)
    admit(0, [*other[2:], *more], 1)
    running.clear()
    first = admit(0, prompt, 40)
    admit(1, prompt, 20)
    step(2)
    admit(2, prompt, 30)
    step(3)
    furthest = max(len(text) for text in batch.texts[:3])  # that of row 0, or the same beside it
    admit(3, [*prompt, *first.tokens, *more], 12)
    while not all(generation.finish for _, generation in running.values()):
        step(1)
    return said[3:], furthest


def check_shared(drafter: str, family: str, sampling: str) -> None:
    lm, how, found = lm_of(family), SAMPLINGS[sampling], {}
    read_whole, _ = share(Engine(lm, DRAFTERS["vanilla"](Case(lm, adapter_for(lm), []))), how)
    for prefix_cache in (False, True):
        case = Case(lm, adapter_for(lm), [prompt + said.tokens for prompt, said in read_whole])
        engine = Engine(lm, DRAFTERS[drafter](case), prefill_chunk=CHUNK, prefix_cache=prefix_cache)
        done, furthest = share(engine, how)
        for prompt, said in done:
            (text,) = vanilla_texts(lm, [prompt], len(said.tokens), how)
            assert prompt + said.tokens == text
        known = [18 + 1 - 2, 0, 36, 36, min(len(done[-1][0]) - 9, furthest - 2)]
        assert [said.reused for _, said in done] == [n * reuses(engine) for n in known]
        found[prefix_cache] = drafts([[said for _, said in done]])
    assert found[True] == found[False]


@pytest.mark.parametrize("number", range(len(FAST)), ids=FAST)
def test_a_prompt_goes_on_in_its_row_and_from_the_text_of_another(number):
    samplings = ["greedy", "sampled"][:: 1 - number // 2 % 2 * 2]
    for checks, sampling in zip((check, check_shared), samplings, strict=True):
        checks(FAST[number], TURNS[number % len(TURNS)], sampling)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", OWN)
@pytest.mark.parametrize("family", TURNS)
def test_so_it_does_in_every_sampling(drafter, family):
    for sampling in SAMPLINGS:
        check(drafter, family, sampling)
        check_shared(drafter, family, sampling)


def test_a_layer_reads_what_was_written_without_drafts():
    """Its keys and the target's are those of a prompt that was read whole."""
    lm, turn = lm_of("llama-compiled"), random_prompts(20, 7)
    (text,) = vanilla_texts(lm, turn[:1], 30)
    prompt = text + turn[1]
    keys = {}
    for prefix_cache in (False, True):
        drafter = Kangaroo(lm, adapter_for(lm), steps=3, threshold=0)
        engine = Engine(lm, drafter, prefix_cache=prefix_cache)
        batch = engine.open(1, LONGEST, Sampling())
        said = engine.admit(batch, 0, Request(turn[0], 30))
        while not said.finish:
            (record,) = engine.step(batch, drafts=False)
            engine.record(batch, 0, record, Request(turn[0], 30), said)
        assert engine.stepper.buffers.unread[0] == 29
        said = engine.admit(batch, 0, Request(prompt, 10))
        assert said.reused == (len(text) - 2 if prefix_cache else 0)
        engine.step(batch)
        caches = batch.cache, drafter.cache
        keys[prefix_cache] = [
            x[: len(prompt)].clone() for cache in caches for x in (*cache.keys, *cache.values)
        ]
    for known, read in zip(keys[True], keys[False], strict=True):
        torch.testing.assert_close(known, read, rtol=1e-4, atol=1e-4)


def test_prompts_that_nobody_drafts_from_do_not_pile_up():
    lm = lm_of("llama-compiled")
    drafter = Kangaroo(lm, adapter_for(lm))
    engine = Engine(lm, drafter, prefill_chunk=CHUNK)
    batch = engine.open(2, LONGEST, Sampling())
    for seed in range(6):
        for row, prompt in enumerate(random_prompts(40, 9, seed=seed)):
            engine.admit(batch, row, Request(prompt, 1))
    assert len(drafter.prompts) == 2  # the last chunks of the last two


def test_a_chunk_is_handed_on_before_the_next_one_is_read(monkeypatch):
    lm, events = lm_of("llama-compiled"), []
    drafter = Kangaroo(lm, adapter_for(lm))
    for owner, name in ((lm, "read"), (drafter, "prefill")):
        do = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *x, do=do, name=name: (events.append(name), do(*x))[1]
        )
    Engine(lm, drafter, prefill_chunk=CHUNK).generate(random_prompts(40), 4)
    assert events == ["read", "prefill"] * 3
