"""One thread decodes for all: requests wait for a row, enter it in parts, and are stepped together.

What fails for a job alone ends that job. A step is one call for all rows: if it fails, the texts
that have a row end, and the batch is opened anew.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kangaroo.engine.batch import Batch
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request, StepRecord
from kangaroo.engine.sampling import Sampling
from kangaroo.utils.errors import KangarooError

log = logging.getLogger(__name__)

# How a job can end, beside a text. The last: because nothing is decoded any more.
CANCELLED, FAILED, STOPPED = "cancelled", "failed", "stopped"


class Busy(KangarooError):
    """No more requests can wait."""


class Closing(KangarooError):
    """The server takes no more requests."""


@dataclass
class Event:
    """A step of a job: what was written, of which the first `accepted` were draft tokens, and how
    many were `drafted`; how the job ended, in the engine's words or this module's, if it did."""

    tokens: list[int]
    accepted: int = 0
    drafted: int = 0
    finish: str = ""
    reused: int = 0  # of the first step: tokens of the prompt that were in the cache already


@dataclass(eq=False)
class Job:
    """A request and who is told about it.

    Args:
        tell: called in the scheduler's thread, once for every step; it must return at once.
        row: where it is decoded; None while it waits.
        parts, generation: its prompt on its way into the row, and what it writes there.
    """

    request: Request
    tell: Callable[[Event], object]
    cancelled: bool = False
    row: int | None = None
    parts: Generator[None, None, Generation] | None = None
    generation: Generation | None = None


class Scheduler:
    """Decodes jobs as they come.

    Args:
        max_batch_size: texts that are written at the same time.
        max_model_len: tokens of a text, prompt included.
        max_queue: jobs that wait for a row; one more is refused.
    """

    def __init__(self, engine: Engine, max_batch_size: int, max_model_len: int, max_queue: int):
        self.engine, self.max_queue = engine, max_queue
        self.max_batch_size, self.max_model_len = max_batch_size, max_model_len
        self.waiting: deque[Job] = deque()
        self.entering: list[Job] = []  # one at a time
        self.running: list[Job] = []
        self.failure, self.closing, self.abandoning = "", False, False
        # free rows, the one that was written longest ago first
        self.idle = list(range(max_batch_size))
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="decoding", daemon=True)

    def start(self) -> Scheduler:
        """Begin to decode, in a thread of its own."""
        self.thread.start()
        return self

    @property
    def alive(self) -> bool:
        """Whether jobs are decoded."""
        return self.thread.is_alive() and not self.failure

    @property
    def load(self) -> dict[str, int]:
        """How many texts are written, enter, and wait."""
        queues = {"running": self.running, "entering": self.entering, "waiting": self.waiting}
        return {state: len(jobs) for state, jobs in queues.items()}

    def check(self, request: Request) -> None:
        """Errors: `PromptError` for a request that can never be served."""
        self.engine.check(request)
        request.check_fits("this server's limit for both together is", self.max_model_len)

    def submit(self, *jobs: Job) -> None:
        """Let jobs wait for a row, all of them or none. Errors: `Busy` where too many wait already;
        `Closing` when the server ends or has failed."""
        with self.changed:
            if self.closing or not self.alive:
                raise Closing(self.failure or "the server is shutting down.")
            waiting, most = len(self.waiting), self.max_queue
            if waiting + len(jobs) > most:
                raise Busy(f"{waiting} requests wait already, and no more than {most} can.")
            self.waiting += jobs
            self.changed.notify()

    def cancel(self, job: Job) -> None:
        """End a job, whoever asked for it has gone."""
        job.cancelled = True  # as the next step sees

    def close(self, seconds: float) -> None:
        """Take no more jobs, and finish those that there are; what is left after so many seconds is
        cancelled."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(seconds)
        self.abandoning = True  # before the next step
        self.thread.join()

    def _run(self) -> None:
        try:
            batch = self._open()
            while self._wait():
                if not self._round(batch):
                    for job in [*self.running, *self.entering]:
                        self._end(job, FAILED)
                    batch = self._open()
        except Exception as error:  # no job may wait for a thread that is gone
            log.exception("decoding has failed")
            self.failure = f"decoding has failed: {type(error).__name__}: {error}"
            for job in self._jobs():
                self._end(job, STOPPED)

    def _open(self) -> Batch:
        return self.engine.open(self.max_batch_size, self.max_model_len, Sampling())

    def _jobs(self) -> list[Job]:
        with self.changed:
            return [*self.waiting, *self.entering, *self.running]

    def _wait(self) -> bool:
        """Until there is something to do; false when there will be nothing more."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing or self._jobs())
            return bool(self._jobs())

    def _round(self, batch: Batch) -> bool:
        """A part of a prompt and a step of all texts. Returns whether the batch is as it should be:
        by then nothing holds what an error's traceback did."""
        try:
            for job in self._jobs():
                if job.cancelled or self.abandoning:
                    self._end(job, CANCELLED, batch)
            self._enter(batch)
            if self.running:
                self._step(batch)
        except Exception:
            log.exception("a step has failed, and all texts with it")
            return False
        return True

    def _end(self, job: Job, why: str, batch: Batch | None = None) -> None:
        """A job ends before its text does, in a batch that is still used."""
        row = job.row
        self._leave(job)
        self._tell(job, Event([], finish=why))
        if row is not None and batch is not None:
            batch.stop(row)

    def _leave(self, job: Job) -> None:
        """A job leaves the queue, or its row."""
        with self.changed:
            for jobs in (self.entering, self.running, self.waiting):
                if job in jobs:
                    jobs.remove(job)
        if job.row is not None:
            self.idle.append(job.row)
        job.row = job.parts = job.generation = None

    def _enter(self, batch: Batch) -> None:
        """A part of the next prompt enters its row. What fails here fails for this job alone."""
        with self.changed:
            if not self.entering and self.waiting and self.idle:
                self.entering.append(self.waiting.popleft())
        if not self.entering:
            return
        (job,) = self.entering
        try:
            if job.parts is None:
                job.row = self._row_for(batch, job.request.prompt)
                self.idle.remove(job.row)
                job.parts = self.engine.prefill_chunks(batch, job.row, job.request)
            next(job.parts)
        except StopIteration as entered:
            job.parts, job.generation = None, entered.value
            self.entering.remove(job)
            self.running.append(job)
            self._record(job, entered.value.steps[0], entered.value.reused)
        except Exception:
            log.exception("a request has failed")
            self._end(job, FAILED, batch)

    def _row_for(self, batch: Batch, prompt: Sequence[int]) -> int:
        """The free row of a text that this one goes on from, else the one that was written longest
        ago, so that others may still be gone on from."""
        shared = {row: batch.shared(row, prompt) for row in self.idle}
        best = max(shared, key=shared.__getitem__)
        return best if 2 * shared[best] > len(batch.texts[best]) else self.idle[0]

    def _step(self, batch: Batch) -> None:
        """One round of all texts. Nothing is drafted while a prompt enters, or could: with longer
        steps between the parts of prompts, first tokens would be later."""
        with self.changed:
            prompts = bool(self.entering) or (bool(self.idle) and bool(self.waiting))
        records = self.engine.step(batch, drafts=not prompts)
        for job in list(self.running):
            assert job.row is not None and job.generation is not None
            record = records[job.row]
            try:
                self.engine.record(batch, job.row, record, job.request, job.generation)
                self._record(job, record)
            except Exception:
                log.exception("a request has failed")
                self._end(job, FAILED, batch)

    def _record(self, job: Job, record: StepRecord, reused: int = 0) -> None:
        """A job hears of its step; where that was the last, its row is free."""
        assert job.generation is not None
        finish = job.generation.finish
        if finish:
            self._leave(job)
        self._tell(job, Event(list(record.tokens), record.accepted, record.drafted, finish, reused))

    def _tell(self, job: Job, event: Event) -> None:
        """Whoever cannot be told has gone."""
        try:
            job.tell(event)
        except Exception:
            log.exception("nobody hears of a request any more")
            job.cancelled = True
