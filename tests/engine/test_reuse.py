"""A prompt that begins like the text before it in its row is read from where it differs, and
nothing else changes: neither what is written nor what is drafted."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
from cases import DRAFTERS, METHODS, SAMPLINGS, SCRIPTED, Case, lm_of, rounds_of
from helpers import adapter_for, chain_of, random_prompts, vanilla_texts

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import prefill
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling
from kangaroo.heads.adapter import AdapterHeadConfig

LONGEST = 160
CHUNK = 16
OWN = [name for name in DRAFTERS if name not in SCRIPTED]
TURNS = ["llama-compiled", "llama", "qwen3-compiled", "llama-graphs"]
FAST = [name for name in METHODS if name in OWN]  # the slow test has all, in every sampling


@dataclass
class Turn:
    """A prompt, how many tokens follow, all of it, and how many of the prompt's the row has."""

    prompt: list[int]
    new_tokens: int
    text: list[int]
    reused: int


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
        turn.reused = next((i for i, (was, now) in enumerate(pairs) if was != now), most)
    return turns


@cache
def talks(family: str, sampling: str) -> list[list[Turn]]:
    first = random_prompts(9, 40, seed=7)
    lengths = [[4, 11, 9, 2, 1, 6, 5], [13, 5, 2, 17, 7, 1, 3]]
    return [talk(family, SAMPLINGS[sampling], *row) for row in zip(first, lengths, strict=True)]


def converse(engine: Engine, talks: list[list[Turn]], sampling: Sampling) -> list[list[Generation]]:
    """What was written in each row's turns; a row begins its next one as soon as one has ended."""
    done: list[list[Generation]] = [[] for _ in talks]
    turns = [[Request(x.prompt, x.new_tokens, sampling.seed) for x in row] for row in talks]

    def following(row: int, generation: Generation) -> Request | None:
        done[row].append(generation)
        return next(iter(turns[row][len(done[row]) :]), None)

    first = [row[0] for row in turns]
    list(engine.completions(first, sampling, len(talks), after=following, longest=LONGEST))
    return done


def reused_by(engine: Engine, count: int) -> int:
    return max(count - engine.session.stepper.rereads, 0) * engine.prefix_cache


def engines(drafter: str, case: Case) -> list[Engine]:
    # else a draft model would draft where that repays what it has to read, which is less with reuse
    how = {"prefill_chunk": CHUNK, "always_drafts": drafter == "draft-model-auto"}
    return [Engine(case.lm, DRAFTERS[drafter](case), **how, prefix_cache=x) for x in (False, True)]


def check(drafter: str, family: str, sampling: str) -> None:
    lm, of_rows, rounds = lm_of(family), talks(family, sampling), []
    case = Case(lm, adapter_for(lm), [turn.text for row in of_rows for turn in row])
    for engine in engines(drafter, case):
        done = converse(engine, of_rows, SAMPLINGS[sampling])
        for row, turns in zip(done, of_rows, strict=True):
            for generation, turn in zip(row, turns, strict=True):
                assert turn.prompt + generation.tokens == turn.text
                assert generation.reused == reused_by(engine, turn.reused)
        rounds.append(list(map(rounds_of, done)))
    assert rounds[0] == rounds[1]


def share(engine: Engine, sampling: Sampling) -> tuple[list[tuple[list[int], Generation]], int]:
    """Texts that begin like those of other rows: of one that has ended; of a prompt that was just
    read, and of one that was written to; of all that another row is writing. Each with its prompt,
    in rows that had other texts. And how long the longest text is that the last one begins like."""
    (prompt, other, more) = random_prompts(37, 20, 9, seed=11)
    session, admitted = engine.open(4, LONGEST, sampling), []
    batch = session.batch
    running: dict[int, tuple[Request, Generation]] = {}

    def admit(row: int, prompt: list[int], new_tokens: int) -> Generation:
        request = Request(prompt, new_tokens, sampling.seed)
        running[row] = request, (generation := session.admit(row, request))
        admitted.append((prompt, generation))
        return generation

    def step(count: int) -> None:
        for _ in range(count):
            records = session.step()
            for row, (request, generation) in running.items():
                session.record(row, records[row], request, generation)

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
    return admitted[3:], furthest


def check_shared(drafter: str, family: str, sampling: str) -> None:
    lm, how, rounds = lm_of(family), SAMPLINGS[sampling], []
    read_whole, _ = share(Engine(lm, Vanilla()), how)
    case = Case(lm, adapter_for(lm), [prompt + x.tokens for prompt, x in read_whole])
    for engine in engines(drafter, case):
        done, furthest = share(engine, how)
        for prompt, generation in done:
            (text,) = vanilla_texts(lm, [prompt], len(generation.tokens), how)
            assert prompt + generation.tokens == text
        reused = [18 + 1 - 2, 0, 36, 36, min(len(done[-1][0]) - 9, furthest - 2)]
        assert [x.reused for _, x in done] == [reused_by(engine, n) for n in reused]
        rounds.append(rounds_of([x for _, x in done]))
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("number", range(len(FAST)), ids=FAST)
def test_a_prompt_goes_on_in_its_row_and_from_the_text_of_another(number):
    """By graphs, which take the longest, for a chain alone; by tensors for some."""
    sampling = ["greedy", "sampled"][number // 2 % 2]
    checked = check if number % 2 else check_shared
    family = "llama" if number % 5 == 1 else TURNS[number % 2 * 2]
    checked(FAST[number], TURNS[-1] if FAST[number] == "kangaroo" else family, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", OWN)
@pytest.mark.parametrize("family", TURNS)
def test_so_it_does_in_every_sampling(drafter, family):
    for sampling in SAMPLINGS:
        check(drafter, family, sampling)
        check_shared(drafter, family, sampling)


def test_a_layer_reads_what_was_written_without_drafts():
    """Its keys and the target's are those of a prompt that was read whole."""
    lm, (first, more), keys = lm_of("llama-compiled"), random_prompts(20, 7), []
    (text,) = vanilla_texts(lm, [first], 30)
    for engine in engines("kangaroo", Case(lm, adapter_for(lm), [])):
        session = engine.open(1, LONGEST, Sampling())
        batch = session.batch
        generation = session.admit(0, Request(first, 30))
        while not generation.finish:
            (record,) = session.step(drafts=False)
            session.record(0, record, Request(first, 30), generation)
        assert engine.session.stepper.buffers.unread[0] == 29
        generation = session.admit(0, Request(text + more, 10))
        assert generation.reused == (len(text) - 2) * engine.prefix_cache
        session.step()
        both = (batch.cache, engine.drafter.cache)
        keys.append([x for cache in both for x in (*cache.keys, *cache.values)])
    for read, reused in zip(*keys, strict=True):
        length = len(text + more)
        torch.testing.assert_close(reused[:length], read[:length], rtol=1e-4, atol=1e-4)


def test_a_fused_layers_keys_go_on_from_the_deep_states_of_another_row():
    lm, (first, more), keys = lm_of("llama"), random_prompts(20, 7), []
    for prefix_cache in (False, True):
        drafter = chain_of(lm, adapter_for(lm, architecture=AdapterHeadConfig(fused=True)))
        engine = Engine(lm, drafter, prefix_cache=prefix_cache)
        session = engine.open(2, LONGEST, Sampling())
        session.admit(0, Request(first, 30))
        generation = session.admit(1, Request(first + more, 10))
        assert bool(generation.reused) == prefix_cache
        drafter.read_prompts()
        row = slice(drafter.cache.n_slots, drafter.cache.n_slots + len(first + more))
        keys.append(drafter.cache.keys[0][row])
    torch.testing.assert_close(keys[1], keys[0], rtol=1e-4, atol=1e-4)


def test_prompts_that_nobody_drafts_from_do_not_pile_up():
    lm = lm_of("llama-compiled")
    engine = Engine(lm, chain_of(lm, adapter_for(lm)), prefill_chunk=CHUNK)
    session = engine.open(2, LONGEST, Sampling())
    for seed in range(6):
        for row, prompt in enumerate(random_prompts(40, 9, seed=seed)):
            session.admit(row, Request(prompt, 1))
    assert len(engine.drafter.prompts) == 2  # the last chunks of the last two


def test_a_chunk_is_handed_on_before_the_next_one_is_read(monkeypatch):
    lm, events = lm_of("llama-compiled"), []
    drafter = chain_of(lm, adapter_for(lm))
    read, take = prefill.read, drafter.prefill
    monkeypatch.setattr(prefill, "read", lambda *x, **at: events.append("read") or read(*x, **at))
    monkeypatch.setattr(drafter, "prefill", lambda *x: events.append("prefill") or take(*x))
    Engine(lm, drafter, prefill_chunk=CHUNK).generate(random_prompts(40), 4)
    assert events == ["read", "prefill"] * 3
