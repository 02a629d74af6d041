"""Requests that come and go in one batch are decoded as each would be alone."""

import itertools
import random
import re
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
import serving_cases
from serving_cases import Heard, alone, answered, engine_of, job_of, scheduling, target, written

from kangaroo.engine.batch import Batch
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request, StepRecord
from kangaroo.engine.session import Prompt, Session
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.prompts import plain_text
from kangaroo.serving.scheduler import CANCELLED, FAILED, STOPPED, TIMEOUT, Busy, Closing, Scheduler
from kangaroo.utils.errors import PromptError

NOTHING_TO_DO = {"running": 0, "entering": 0, "waiting": 0}
GUILTY = [250, 251, 252, *range(3, 17)]  # two parts and more, each of eight tokens


def test_each_conversation_goes_on_in_the_row_that_has_it():
    rng = random.Random(5)
    texts = [[rng.randrange(3, 250) for _ in range(30)] for _ in range(2)]
    with scheduling() as scheduler:
        for turn in range(4):
            for text in texts:
                job = written(scheduler, text)
                assert job.reused == (len(text) - 3 - 2 if turn else 0)
                text += [*job.tokens, 7, 8 + turn, 9]
            # somebody else's question takes the row that was written longest ago
            assert written(scheduler, [rng.randrange(3, 250) for _ in range(8)]).reused == 0


def test_of_several_choices_the_prompt_is_read_once():
    jobs = [job_of(list(range(3, 33)), 6, seed) for seed in range(3)]
    with scheduling() as scheduler:
        answered(scheduler, *jobs)
    assert [job.reused for job in jobs] == [0, 29, 29]


def watched(engine: Engine, monkeypatch) -> list[tuple[int, bool, int]]:
    """Of each step from now on: texts, whether they might draft, and how much they did."""
    step, steps = Session.step, []

    def watching(session: Session, drafts: bool = True) -> list[StepRecord]:
        records = step(session, drafts)
        active = [record for record in records if record.tokens]
        steps.append((len(active), drafts, sum(record.drafted for record in active)))
        return records

    monkeypatch.setattr(Session, "step", watching)
    return steps


def test_nothing_is_drafted_while_prompts_wait_for_each_other(monkeypatch):
    engine, rng = engine_of(target(), chunk=None), random.Random(8)
    steps = watched(engine, monkeypatch)
    jobs = [job_of([rng.randrange(3, 250) for _ in range(9)], 30) for _ in range(8)]
    with scheduling(engine, max_batch_size=4) as scheduler:
        answered(scheduler, *jobs)
    assert steps[:3] == [(1, False, 0), (2, False, 0), (3, False, 0)]
    assert steps[3][:2] == (4, True) and steps[3][2] > 0  # four others wait, but for a row


def test_nothing_is_drafted_while_a_prompt_enters(monkeypatch):
    engine = engine_of(target(), chunk=4)
    steps = watched(engine, monkeypatch)
    with scheduling(engine) as scheduler:
        answered(scheduler, job_of([7, 8], 90), job_of([5] * 40, 3))
    both = [texts for texts, *_ in steps].index(2)  # after the prompt's tenth and last part
    assert steps[both - 9 : both] == [(1, False, 0)] * 9
    assert steps[both][1] and steps[both][2] > 0


def test_who_cancels_leaves_all_others_as_they_were():
    rng = random.Random(1)
    jobs = [Heard(serving_cases.random_request(rng)) for _ in range(60)]
    with scheduling(max_batch_size=4) as scheduler:
        for i, job in enumerate(jobs):
            scheduler.submit(job)
            if i % 3 == 2:
                job.begun.wait(0.02)
            if i % 3:
                job.cancelled = True
        assert all(job.ended.wait(60) for job in jobs)
        assert scheduler.load == NOTHING_TO_DO
    assert {job.finish for job in jobs} == {CANCELLED, "length"}
    for job in jobs:
        text = alone(job.request)
        assert job.tokens == (text if job.finish == "length" else text[: len(job.tokens)])


@pytest.mark.parametrize(
    ("seconds_a_token", "order"),
    [(1.0, [100] * 3 + [9] * 3 + [100] * 22), (0.0, [100] * 25 + [9] * 3)],
    ids=["a long one is not read yet when its short one is", "a long one has been due"],
)
def test_prompts_are_read_in_the_order_in_which_they_are_due(monkeypatch, seconds_a_token, order):
    engine, parts, advance = engine_of(target(), chunk=4), [], Prompt.advance
    long, short = (job_of([length] * length, 7) for length in (100, 9))

    def watched(prompt: Prompt) -> Generation | None:
        if prompt.session is engine.session:
            parts.append(len(prompt.request.prompt))
            if len(parts) == 3:
                scheduler.submit(short)
        return advance(prompt)

    monkeypatch.setattr(Prompt, "advance", watched)
    with scheduling(engine) as scheduler:
        scheduler.read_tokens, scheduler.read_seconds = 1, seconds_a_token
        answered(scheduler, long)
        short.check()
    assert parts == order


def test_what_a_prompt_takes_is_learnt_from_those_before():
    with scheduling() as scheduler:
        text = [*range(3, 33)]
        written(scheduler, text)
        assert scheduler.read_tokens == len(text) and scheduler.read_seconds > 0
        written(scheduler, [*text, 40, 41])  # all but two are in the cache
        assert scheduler.read_tokens == len(text) + 2


def test_no_more_wait_than_may_and_all_choices_of_a_request_wait_or_none():
    with scheduling(max_batch_size=1, max_queue=2) as scheduler:
        running = job_of([5], 150)
        scheduler.submit(running)
        assert running.begun.wait(60)
        scheduler.submit(job_of([5], 1))
        with pytest.raises(Busy, match="1 requests wait already, and no more than 2"):
            scheduler.submit(job_of([5], 1), job_of([5], 1))
        with pytest.raises(PromptError, match="3 texts are more than max_queue=2"):
            scheduler.submit(*(job_of([5], 1) for _ in range(3)))
        assert scheduler.load["waiting"] == 1
        running.cancelled = True


def test_closing_finishes_what_there_is_and_takes_nothing_more():
    with scheduling(max_batch_size=1) as scheduler:
        jobs = [job_of([5 + i], 20) for i in range(4)]
        scheduler.submit(*jobs)
        assert scheduler.accepts
        scheduler.close(60)
        assert not scheduler.accepts
        assert [job.finish for job in jobs] == ["length"] * 4
        with pytest.raises(Closing, match="shutting down"):
            scheduler.submit(jobs[0])


def test_what_is_not_finished_in_time_is_cancelled_at_the_end():
    with scheduling(max_batch_size=1) as scheduler:
        jobs = [job_of([5], serving_cases.LONGEST - 1) for _ in range(30)]
        scheduler.submit(*jobs)
        scheduler.close(0.05)
        assert all(job.finish for job in jobs) and jobs[-1].finish == CANCELLED


def test_a_job_that_takes_too_long_ends_wherever_it_is(monkeypatch):
    with scheduling(max_batch_size=1) as scheduler:
        failing(monkeypatch, Session, "step", lambda *_: time.sleep(0.001))
        request = Request([5], 150, ignore_eos=True)
        late, waits = (Heard(request, time.monotonic() + seconds) for seconds in (0.02, -1))
        scheduler.submit(late, waits)
        assert late.ended.wait(60) and waits.ended.wait(60)
        assert (late.finish, waits.finish, waits.tokens) == (TIMEOUT, TIMEOUT, [])


def failing(
    monkeypatch,
    owner: object,
    name: str,
    fails: Callable[[int, tuple], object],
    engine: Engine | None = None,
) -> list[int]:
    """Let calls of a method fail where `fails` says so, of their number and arguments; returns the
    numbers of those that did. Of sessions those of `engine` count alone."""
    method, calls, failed = getattr(owner, name), itertools.count(), []

    def call(*args: object, **options: object) -> object:
        if engine is not None and args[0].engine is not engine:
            return method(*args, **options)
        if fails(number := next(calls), (*args, *options.values())):
            failed.append(number)
            raise RuntimeError(f"{name}, call {number}")
        return method(*args, **options)

    monkeypatch.setattr(owner, name, call)
    return failed


def crowd() -> tuple[list[Heard], Heard]:
    """Jobs of all kinds, and the guilty one in their middle: with more rows than one it has others
    beside it. Two end at a stop string, a part of which is written before a fault."""
    rng = random.Random(11)
    requests = [serving_cases.random_request(rng, 30) for _ in range(7)]
    for request in requests[:2]:
        request.max_new_tokens = 40
        request.stop = [re.findall("[ -~]{2}", plain_text(byte_tokenizer(), alone(request)))[-1]]
    guilty = Heard(Request(GUILTY, 40, 3, sampling=serving_cases.SAMPLINGS[1], ignore_eos=True))
    jobs = [Heard(request) for request in requests]
    return [*jobs[:2], guilty, *jobs[2:]], guilty


def check_others(scheduler: Scheduler, jobs: list[Heard]) -> None:
    """Each gets the text that it gets alone, and all rows are free again for whoever comes."""
    for job in jobs:
        job.check()
        assert job.reused < len(job.request.prompt)  # that of a second admission is not told
    assert scheduler.accepts
    written(scheduler, [9, 8, 7])
    assert scheduler.load == NOTHING_TO_DO and sorted(scheduler.idle) == [0, 1, 2]
    assert scheduler.engine.session.batch.done == [True] * 3


def check_crowd(scheduler: Scheduler, finish: str, jobs: list[Heard], guilty: Heard) -> None:
    scheduler.submit(*jobs)
    assert guilty.ended.wait(60) and guilty.finish == finish
    assert guilty.tokens == alone(guilty.request)[: len(guilty.tokens)]
    check_others(scheduler, [job for job in jobs if job is not guilty])


def steps_guilty(engine: Engine) -> bool:
    """Whether a step writes on at the guilty one's text, of which there is something already."""
    texts = zip(engine.session.batch.texts, engine.session.batch.done, strict=True)
    return any(text[:17] == GUILTY and len(text) > 20 and not done for text, done in texts)


CALLS: dict[str, Callable[[Engine, int, tuple], bool]] = {
    "match_prefix": lambda engine, number, args: args[2] == GUILTY,
    "common_prefix": lambda engine, number, args: args[1] == GUILTY,
    "write_first": lambda engine, number, args: (  # when the row takes part in steps already
        engine.session.batch.texts[args[0]] == GUILTY
    ),
    "step": lambda engine, number, args: steps_guilty(engine) and args[1],  # where it drafts
    "record": lambda engine, number, args: number > 6 and args[3].prompt == GUILTY,
}


@pytest.mark.parametrize("method", CALLS)
def test_what_fails_for_one_request_ends_that_one_alone(monkeypatch, method):
    engine = engine_of(target())
    with scheduling(engine) as scheduler:
        written(scheduler, [3, 4])  # the batch is open
        owner = engine.session.batch if hasattr(engine.session.batch, method) else Session
        of_engine = engine if owner is Session else None
        failed = failing(monkeypatch, owner, method, partial(CALLS[method], engine), of_engine)
        check_crowd(scheduler, FAILED, *crowd())
    assert len(failed) == (2 if method == "step" else 1)


@pytest.mark.parametrize("number, faults", [(0, 1), (1, 2), (6, 1), (6, 2)])
def test_texts_go_on_as_they_were_where_a_step_fails(monkeypatch, number, faults):
    """Once, or once more at the next chance: that ends whom it hits alone."""
    monkeypatch.setattr("kangaroo.serving.scheduler.PAUSE", 0)
    engine, (jobs, _) = engine_of(target()), crowd()
    with scheduling(engine) as scheduler:
        fails = lambda n, _: number <= n < number + faults  # noqa: E731
        failed = failing(monkeypatch, Session, "step", fails, engine)
        opened = failing(monkeypatch, engine, "open", lambda n, _: n < 2)  # and is tried again
        scheduler.submit(*jobs)
        assert [job.ended.wait(60) and job.finish for job in jobs].count(FAILED) == faults - 1
        check_others(scheduler, [job for job in jobs if job.finish != FAILED])
    assert len(failed) == faults and opened == [0, 1]


def test_a_step_that_fails_for_all_together_lets_each_go_on(monkeypatch):
    """As where memory does not hold what two texts at a time take."""
    engine, (jobs, _) = engine_of(target()), crowd()
    with scheduling(engine) as scheduler:
        fails = lambda _, args: sum(args[0].batch.done) < 2  # noqa: E731
        failed = failing(monkeypatch, Session, "step", fails, engine)
        scheduler.submit(*jobs)
        check_others(scheduler, jobs)
    assert failed


def test_a_row_that_cannot_be_stopped_ends_nobody_else(monkeypatch):
    jobs, guilty = crowd()
    with scheduling() as scheduler:
        guilty.notify = lambda event: (guilty.hear(event), setattr(guilty, "cancelled", True))

        def is_served(_, x):
            return x[0].size > 1 and x[0].texts[x[1]][:17] == GUILTY

        failed = failing(monkeypatch, Batch, "stop", is_served)
        check_crowd(scheduler, CANCELLED, jobs, guilty)
    assert len(failed) == 1


def test_who_cannot_be_told_holds_up_nobody():
    jobs, deaf = crowd()
    deaf.notify = Mock(side_effect=RuntimeError("Event loop is closed"))
    with scheduling() as scheduler:
        scheduler.submit(*jobs)
        check_others(scheduler, [job for job in jobs if job is not deaf])
    assert 0 < len(deaf.written) < 40


@pytest.mark.parametrize("begun", [True, False])
def test_decoding_ends_for_all_where_no_batch_can_be_opened(monkeypatch, begun):
    monkeypatch.setattr("kangaroo.serving.scheduler.PAUSE", 0.05)
    engine, jobs = engine_of(target()), [job_of([5], 9) for _ in range(6)]
    opened = [] if begun else failing(monkeypatch, engine, "open", lambda *_: True)
    with scheduling(engine) as scheduler:
        if begun:
            written(scheduler, [3, 4])
            failing(monkeypatch, Session, "step", lambda *_: True, engine)
            opened = failing(monkeypatch, engine, "open", lambda *_: True)
        scheduler.submit(*jobs)
        assert all(job.ended.wait(60) for job in jobs)
        assert {job.finish for job in jobs} == {STOPPED} and opened == [0, 1, 2]
        assert not scheduler.accepts and "RuntimeError: open, call 2" in scheduler.failure
        with pytest.raises(Closing, match="RuntimeError"):
            scheduler.submit(jobs[0])
