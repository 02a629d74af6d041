"""One thread decodes for all: requests wait for a row, enter it in parts, and are stepped together.

Of the prompts that can be read, the next part is one of that whose first token is due first: as
long after it arrived as it takes to read alone. So a short prompt does not wait for a long one that
came just before it, and a long one is overtaken by those alone that arrive while it could be read.

What fails for a job alone ends that job. A step is one call for all rows: if it fails, the batch is
opened anew, and each job that had a row goes on alone for a step, from what it has written. Who
fails again is ended; the others go on together, with the same texts, since noise depends on seed,
position and token alone.

What happens to a job is told to it from that thread; it may be cancelled from any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kangaroo.engine.batch import Batch
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request, StepRecord
from kangaroo.engine.sampling import Sampling
from kangaroo.serving.jobs import FAILED, STOPPED, Busy, Closing, Event, Job

log = logging.getLogger(__name__)

OPENINGS = 3  # of a batch before decoding ends: memory may become free meanwhile
PAUSE = 0.2  # seconds between two of them


@dataclass
class Scheduler:
    """Decodes jobs as they come.

    Args:
        max_batch_size: texts that are written at the same time.
        max_model_len: tokens of a text, prompt included.
        max_queue: jobs that wait for a row; one more is refused.
    """

    engine: Engine
    max_batch_size: int
    max_model_len: int
    max_queue: int
    failure: str = ""
    waiting: deque[Job] = field(default_factory=deque)
    entering: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    read_tokens: int = 0  # of prompts that have entered
    read_seconds: float = 0.0  # which that took
    closing: bool = False
    abandoning: bool = False

    def __post_init__(self) -> None:
        # free rows, the one that was written longest ago first
        self.idle = list(range(self.max_batch_size))
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
        """Let jobs wait for a row, all of them or none.

        Errors: `Busy` where too many wait already; `Closing` when the server ends or has failed.
        """
        with self.changed:
            if self.closing or not self.alive:
                raise Closing(self.failure or "the server is shutting down.")
            if len(self.waiting) + len(jobs) > self.max_queue:
                raise Busy(
                    f"{len(self.waiting)} requests wait already, and no more than "
                    f"{self.max_queue} can. Try again later."
                )
            for job in jobs:
                job.arrived = time.monotonic()
            self.waiting += jobs
            self.changed.notify()

    def cancel(self, job: Job) -> None:
        """End a job, whoever asked for it has gone."""
        with self.changed:
            job.cancelled = True
            self.changed.notify()

    def close(self, seconds: float) -> bool:
        """Take no more jobs, and finish those that there are.

        Returns whether that took no longer than so many seconds; what is left then is cancelled.
        """
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(seconds)
        finished = not self.thread.is_alive()
        with self.changed:
            self.abandoning = True
            self.changed.notify()
        self.thread.join()
        return finished

    def _jobs(self) -> list[Job]:
        """All there are; for the thread that decodes."""
        return [*self.waiting, *self.entering, *self.running]

    def _run(self) -> None:
        try:
            batch = self._open()
            while self._wait():
                if not self._round(batch):
                    self._suspect()
                    batch = self._open()
        except Exception as error:  # no job may wait for a thread that is gone
            log.exception("decoding has failed")
            self.failure = f"decoding has failed: {type(error).__name__}: {error}"
            with self.changed:
                jobs = self._jobs()
            for job in jobs:
                self._leave(job)
                self._tell(job, Event([], finish=STOPPED))

    def _open(self) -> Batch:
        for _ in range(OPENINGS - 1):
            try:
                return self.engine.open(self.max_batch_size, self.max_model_len, Sampling())
            except Exception:
                log.exception("no batch could be opened; once more")
            time.sleep(PAUSE)
        return self.engine.open(self.max_batch_size, self.max_model_len, Sampling())

    def _wait(self) -> bool:
        """Until there is something to do; false when there will be nothing more."""
        with self.changed:
            while not self._jobs():
                if self.closing:
                    return False
                self.changed.wait()
        return True

    def _round(self, batch: Batch) -> bool:
        """A part of a prompt and a step of all texts. Returns whether the batch is as it should be;
        when this has returned, nothing holds what an error's traceback did."""
        try:
            self._drop(batch)
            self._enter(batch)
            if self.running:
                self._step(batch)
        except Exception:
            log.exception("a step has failed; each text goes on alone")
            return False
        return True

    def _suspect(self) -> None:
        """All jobs leave their rows, to go on alone. One that was alone is ended."""
        jobs = [*self.running, *self.entering]
        self.running.clear()
        self.entering.clear()
        self.idle = list(range(self.max_batch_size))
        for job in reversed(jobs):
            job.row = job.parts = job.generation = None
            if job.suspect:
                self._tell(job, Event([], finish=FAILED))
                continue
            job.suspect = True
            with self.changed:
                self.waiting.appendleft(job)

    def _leave(self, job: Job) -> int | None:
        """A job leaves the queue, or its row, which is returned: the batch has to stop that."""
        row, job.row = job.row, None
        job.parts = job.generation = None
        with self.changed:
            for jobs in (self.entering, self.running, self.waiting):
                if job in jobs:
                    jobs.remove(job)
        if row is not None:
            self.idle.append(row)
        return row

    def _end(self, batch: Batch, job: Job, why: str) -> None:
        """A job ends before its text does."""
        row = self._leave(job)
        self._tell(job, Event([], finish=why))
        if row is not None:
            batch.stop(row)

    @contextmanager
    def _blaming(self, batch: Batch, job: Job) -> Iterator[None]:
        """What fails here fails for this job alone."""
        try:
            yield
        except Exception:
            log.exception("a request has failed")
            self._end(batch, job, FAILED)

    def _drop(self, batch: Batch) -> None:
        """End the jobs that should end before their texts do."""
        with self.changed:
            if self.abandoning:
                for job in self._jobs():
                    job.cancelled = True
            ended = [(job, job.over) for job in self._jobs() if job.over]
        for job, why in ended:
            self._end(batch, job, why)

    def _readable(self) -> list[Job]:
        """Jobs whose prompts can be read now; a suspect is alone in the batch."""
        with self.changed:
            waiting = list(self.waiting)
        suspects = [job for job in (*self.entering, *self.running, *waiting) if job.suspect]
        if suspects:
            return self.entering if self.entering or self.running else suspects[:1]
        return [*self.entering, *(waiting if self.idle else [])]

    def _enter(self, batch: Batch) -> None:
        """A part of a prompt enters its row, if there is one that can be read."""
        due: dict[Job, float] = {}
        for job in self._readable():
            with self._blaming(batch, job):
                due[job] = self._due(batch, job)
        if not due:
            return
        job = min(due, key=due.__getitem__)
        with self._blaming(batch, job):
            if job.parts is None:
                self._admit(batch, job)
            assert job.parts is not None
            try:
                next(job.parts)
                return
            except StopIteration as entered:
                generation = job.generation = entered.value
            job.parts = None
            self.entering.remove(job)
            self.running.append(job)
            self.read_tokens += len(job.text) - generation.reused
            self.read_seconds += generation.prefill_seconds
            self._record(job, generation.steps[0])

    def _due(self, batch: Batch, job: Job) -> float:
        """When a job's first token is due, by what prompts have taken so far."""
        if job.due is None:
            _, cached = self.engine.match_prefix(batch, 0, job.text)
            unread = len(job.text) - cached
            job.due = job.arrived + unread * self.read_seconds / max(self.read_tokens, 1)
        return job.due

    def _admit(self, batch: Batch, job: Job) -> None:
        """A job that waits takes a free row, and goes on from what it has written."""
        row = self._row_for(batch, job.text)  # nobody who submits waits for this
        request = replace(job.request, written=list(job.written))
        job.parts = self.engine.prefill_chunks(batch, row, request)
        job.row = row
        self.idle.remove(row)
        self.entering.append(job)
        with self.changed:
            self.waiting.remove(job)

    def _row_for(self, batch: Batch, text: list[int]) -> int:
        """The free row of a text that this one goes on from; where there is none, the row that
        was written longest ago, so that others may still be gone on from."""
        shared = {row: batch.shared(row, text) for row in self.idle}
        best = max(shared, key=shared.__getitem__)
        return best if 2 * shared[best] > len(batch.texts[best]) else self.idle[0]

    def _step(self, batch: Batch) -> None:
        """One round of all texts. Nothing is drafted while a prompt enters, or waits though a row
        is free for it: with longer steps between the parts of prompts, first tokens would be later.
        A suspect drafts, since that may be what failed.
        """
        suspect = self.running[0] if self.running[0].suspect else None
        with self.changed:
            prompts = bool(self.entering) or (bool(self.idle) and bool(self.waiting))
        records = self.engine.step(batch, drafts=suspect is not None or not prompts)
        for job in list(self.running):
            assert job.row is not None and job.generation is not None
            with self._blaming(batch, job):
                self.engine.record(batch, job.row, records[job.row], job.request, job.generation)
                self._record(job, records[job.row])
        if suspect is not None:
            self._acquit(batch, suspect)

    def _acquit(self, batch: Batch, job: Job) -> None:
        """A suspect has made a step alone; unless its text has ended, it waits for the others."""
        job.suspect, row = False, job.row
        if row is None or not any(other.suspect for other in self._jobs()):
            return
        self._leave(job)
        with self.changed:
            self.waiting.appendleft(job)
        batch.stop(row)

    def _record(self, job: Job, record: StepRecord) -> None:
        """A job hears of its step; where that was the last, its row is free."""
        generation = job.generation
        assert generation is not None
        reused = 0 if job.written else generation.reused
        job.written += record.tokens
        if generation.finish:
            self._leave(job)
        tokens, finish = list(record.tokens), generation.finish
        self._tell(job, Event(tokens, record.accepted, record.drafted, finish, reused))

    def _tell(self, job: Job, event: Event) -> None:
        """Whoever cannot be told has gone."""
        try:
            job.tell(event)
        except Exception:
            log.exception("nobody hears of a request any more")
            job.cancelled = True
