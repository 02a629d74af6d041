"""Requests that come and go in one batch are decoded as each would be alone."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from functools import partial

import pytest
from serving_cases import (
    LONGEST,
    SAMPLINGS,
    Heard,
    alone,
    engine_of,
    heard,
    random_request,
    scheduling,
    target,
)

from kangaroo.engine.batch import Batch
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request, StepRecord
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import plain_text
from kangaroo.serving.scheduler import (
    CANCELLED,
    FAILED,
    STOPPED,
    Busy,
    Closing,
    Scheduler,
)
from kangaroo.utils.errors import PromptError

NOTHING_TO_DO = {"running": 0, "entering": 0, "waiting": 0}


def test_every_text_is_the_one_that_is_written_alone():
    rng = random.Random(0)
    jobs = [Heard(random_request(rng)) for _ in range(40)]
    with scheduling() as scheduler:
        for job in jobs:
            scheduler.submit(job)
            time.sleep(rng.random() * 0.01)
        for job in jobs:
            job.check()


def written(scheduler: Scheduler, prompt: list[int]) -> Heard:
    job = heard(prompt, 9)
    scheduler.submit(job)
    job.check()
    return job


def test_each_conversation_goes_on_in_the_row_that_has_it():
    rng = random.Random(5)
    texts = [[rng.randrange(3, 250) for _ in range(30)] for _ in range(2)]
    with scheduling() as scheduler:
        for turn in range(4):
            for text in texts:
                job = written(scheduler, text)
                assert job.reused == (len(text) - 3 - 2 if turn else 0)
                text += [*job.tokens, 7, 8 + turn, 9]
            # somebody else's question takes the row that neither of them is in
            assert written(scheduler, [rng.randrange(3, 250) for _ in range(8)]).reused == 0


def test_of_several_choices_the_prompt_is_read_once():
    jobs = [heard(list(range(3, 33)), 6, seed) for seed in range(3)]
    with scheduling() as scheduler:
        scheduler.submit(*jobs)
        for job in jobs:
            job.check()
    assert [job.reused for job in jobs] == [0, 29, 29]


def watched(engine: Engine, monkeypatch) -> list[tuple[int, bool, int]]:
    """Of each step from now on: texts, whether they might draft, and how much they did."""
    step, seen = engine.step, []

    def watching(batch: Batch, drafts: bool = True) -> list[StepRecord]:
        records = step(batch, drafts)
        active = [record for record in records if record.tokens]
        seen.append((len(active), drafts, sum(record.drafted for record in active)))
        return records

    monkeypatch.setattr(engine, "step", watching)
    return seen


def test_nothing_is_drafted_while_prompts_wait_for_each_other(monkeypatch):
    """Where rows are free for them; those that wait for a row do not stop drafting."""
    engine, rng = engine_of(target(), chunk=None), random.Random(8)
    seen = watched(engine, monkeypatch)
    jobs = [heard([rng.randrange(3, 250) for _ in range(9)], 30) for _ in range(8)]
    with scheduling(engine, max_batch_size=4) as scheduler:
        scheduler.submit(*jobs)
        for job in jobs:
            job.check()
    assert seen[:3] == [(1, False, 0), (2, False, 0), (3, False, 0)]
    assert seen[3][:2] == (4, True) and seen[3][2] > 0  # four others wait, but for a row


def test_who_cancels_leaves_all_others_as_they_were():
    """Before a row is free, while the prompt enters, and in the middle of a text."""
    rng = random.Random(1)
    jobs = [Heard(random_request(rng)) for _ in range(60)]
    with scheduling(max_batch_size=4) as scheduler:
        for i, job in enumerate(jobs):
            scheduler.submit(job)
            if i % 3 == 2:
                job.begun.wait(0.02)
            if i % 3:
                scheduler.cancel(job)
        assert all(job.ended.wait(60) for job in jobs)
        assert scheduler.load == NOTHING_TO_DO
    assert {job.finish for job in jobs} == {CANCELLED, "length"}
    for job in jobs:
        text = alone(job.request)
        assert job.tokens == (text if job.finish == "length" else text[: len(job.tokens)])


def test_a_long_prompt_does_not_keep_others_waiting():
    short, long = heard([7, 8], 100), Heard(Request([5] * 180, 1))
    with scheduling(engine_of(target(), chunk=4)) as scheduler:
        scheduler.submit(short)
        assert short.begun.wait(60)
        scheduler.submit(long)
        before = len(short.tokens)
        assert long.begun.wait(60)
        # it has 45 parts; between any two of them the other text went on
        assert len(short.tokens) - before >= 40 or short.finish
        assert short.ended.wait(60)


def test_no_more_wait_than_may_and_all_choices_of_a_request_wait_or_none():
    with scheduling(max_batch_size=1, max_queue=2) as scheduler:
        running = heard([5], 150)
        scheduler.submit(running)
        assert running.begun.wait(60)
        scheduler.submit(heard([5], 1))
        with pytest.raises(Busy, match="1 requests wait already, and no more than 2"):
            scheduler.submit(heard([5], 1), heard([5], 1))
        assert scheduler.load["waiting"] == 1
        scheduler.cancel(running)


def test_a_request_that_can_never_be_served_is_refused():
    with scheduling() as scheduler:
        scheduler.check(Request([5] * 10, LONGEST - 10))
        with pytest.raises(PromptError, match="ask for at most 190 new tokens"):
            scheduler.check(Request([5] * 10, LONGEST - 9))
        with pytest.raises(PromptError, match="the prompt is empty"):
            scheduler.check(Request([], 3))


def test_closing_finishes_what_there_is_in_time_and_takes_nothing_more():
    with scheduling(max_batch_size=1) as scheduler:
        jobs = [heard([5 + i], 20) for i in range(4)]
        scheduler.submit(*jobs)
        scheduler.close(60)
        assert [job.finish for job in jobs] == ["length"] * 4
        with pytest.raises(Closing, match="shutting down"):
            scheduler.submit(jobs[0])
    with scheduling(max_batch_size=1) as scheduler:
        jobs = [heard([5], LONGEST - 1) for _ in range(30)]
        scheduler.submit(*jobs)
        scheduler.close(0.05)
        assert all(job.finish for job in jobs) and jobs[-1].finish == CANCELLED


class Fault(RuntimeError):
    """What a test lets fail."""


Calls = Callable[[int, tuple], bool]  # of a call's number and arguments: whether it fails


def failing(monkeypatch, owner: object, name: str, fails: Calls) -> list[int]:
    """Let calls of a method fail where `fails` says so; returns their numbers."""
    method, calls, failed = getattr(owner, name), itertools.count(), []

    def call(*given: object, **options: object) -> object:
        if fails(number := next(calls), (*given, *options.values())):
            failed.append(number)
            raise Fault(f"{name}, call {number}")
        return method(*given, **options)

    monkeypatch.setattr(owner, name, call)
    return failed


GUILTY = [250, 251, 252, *range(3, 17)]  # two parts and more, each of eight tokens


def crowd() -> tuple[list[Heard], Heard]:
    """Jobs of all kinds, and the guilty one in their middle: with more rows than one it has others
    beside it. Two end at a stop string, a part of which is written before a fault."""
    rng = random.Random(11)
    requests = [random_request(rng, 30) for _ in range(7)]
    for request in requests[:2]:
        request.max_new_tokens = 40
        text = plain_text(byte_tokenizer(), alone(request))
        request.stop = [re.findall("[ -~]{2}", text)[-1]]
    guilty = Heard(Request(GUILTY, 40, 3, sampling=SAMPLINGS[1], ignore_eos=True))
    jobs = [Heard(request) for request in requests]
    return [*jobs[:2], guilty, *jobs[2:]], guilty


def check_others(scheduler: Scheduler, jobs: list[Heard]) -> None:
    """Each gets the text that it gets alone, and a row is free again for whoever comes."""
    for job in jobs:
        job.check()
    assert scheduler.alive
    written(scheduler, [9, 8, 7])
    assert scheduler.load == NOTHING_TO_DO and sorted(scheduler.idle) == [0, 1, 2]
    assert scheduler.engine.batch.done == [True] * 3


def check_crowd(scheduler: Scheduler) -> None:
    """The guilty one fails, and nobody else."""
    jobs, guilty = crowd()
    scheduler.submit(*jobs)
    assert guilty.ended.wait(60) and guilty.finish == FAILED
    assert guilty.tokens == alone(guilty.request)[: len(guilty.tokens)]
    check_others(scheduler, [job for job in jobs if job is not guilty])


CALLS: dict[str, Callable[[Engine, int, tuple], bool]] = {
    # the second part of its prompt
    "read": lambda engine, number, given: given[0][0].tolist() == GUILTY[8:16],
    "shared": lambda engine, number, given: given[1] == GUILTY,
    # when the row takes part in steps already
    "first": lambda engine, number, given: engine.batch.texts[given[0]] == GUILTY,
    "record": lambda engine, number, given: number > 6 and given[3].prompt == GUILTY,
}


@pytest.mark.parametrize("method", CALLS)
def test_what_fails_for_one_request_ends_that_one_alone(monkeypatch, method):
    engine = engine_of(target())
    with scheduling(engine) as scheduler:
        written(scheduler, [3, 4])  # the batch is open
        owners = engine, engine.batch, engine.lm
        owner = next(owner for owner in owners if hasattr(owner, method))
        failed = failing(monkeypatch, owner, method, partial(CALLS[method], engine))
        check_crowd(scheduler)
    assert len(failed) == 1


@pytest.mark.parametrize("number", [0, 6])
def test_a_step_that_fails_ends_the_texts_that_have_a_row_and_the_others_are_written(
    monkeypatch, number
):
    engine, (jobs, _) = engine_of(target()), crowd()
    with scheduling(engine) as scheduler:
        failed = failing(monkeypatch, engine, "step", lambda n, _: n == number)
        scheduler.submit(*jobs)
        ends = [job.ended.wait(60) and job.finish for job in jobs]
        assert 1 <= ends.count(FAILED) <= 3
        check_others(scheduler, [job for job in jobs if job.finish != FAILED])
    assert failed == [number]


def test_decoding_ends_for_all_where_no_batch_can_be_opened(monkeypatch):
    """After a step that failed; nobody waits for it."""
    engine, jobs = engine_of(target()), [heard([5], 9) for _ in range(6)]
    with scheduling(engine) as scheduler:
        written(scheduler, [3, 4])
        failing(monkeypatch, engine, "step", lambda *_: True)
        failing(monkeypatch, engine, "open", lambda *_: True)
        scheduler.submit(*jobs)
        assert all(job.ended.wait(60) for job in jobs)
        assert {job.finish for job in jobs} == {FAILED, STOPPED}
        assert not scheduler.alive and "Fault: open, call 0" in scheduler.failure
        with pytest.raises(Closing, match="Fault"):
            scheduler.submit(jobs[0])
