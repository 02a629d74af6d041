"""Continuous batching in one thread: requests wait for a row, are prefilled in chunks, and decoded.

The next chunk is of the prompt whose first token is due first: its arrival plus the time to read it
alone. So a short prompt does not wait for a long one that arrived just before it, and a long one is
overtaken only by prompts that arrive while it could have been read.

An error in one job's own work ends that job. A step runs all rows: if it fails, each job makes one
step alone, continuing its text in a new batch. A job that fails alone is ended; the others continue
together with the same texts, since noise depends only on seed, position and token.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request, StepRecord
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.session import Prompt, Session
from kangaroo.utils.errors import KangarooError, PromptError

log = logging.getLogger(__name__)

OPENINGS = 3  # attempts to open a batch: memory may become free meanwhile
PAUSE = 0.2  # seconds between two attempts
# How a job can fail.
CANCELLED = "cancelled"
TIMEOUT = "timeout"
FAILED = "failed"
STOPPED = "stopped"  # the thread has ended


class Busy(KangarooError):
    """The queue is full."""

    status = 429  # of the response


class Closing(KangarooError):
    """The server accepts no more requests."""

    status = 503


@dataclass
class Event:
    """A step of a job; one that wrote nothing tells of a failure."""

    step: StepRecord
    finish: str = ""  # "eos", "length", "stop" or a failure as above, once the job has ended
    reused: int = 0  # tokens of the prompt that were in the KV cache, in the first step


@dataclass(eq=False)
class Job:
    """A request in the scheduler."""

    request: Request
    notify: Callable[[Event], object]  # called by the decoding thread; it must return at once
    deadline: float = math.inf  # the time by `time.monotonic` at which the job is ended

    def __post_init__(self) -> None:
        self.cancelled = False  # any thread may set this to end the job
        self.arrived = 0.0  # the time of its submission, by the same clock
        self.due: float | None = None  # the time at which its first token is due, once computed
        self.row: int | None = None  # None while it waits
        self.prompt: Prompt | None = None  # while it enters
        self.generation: Generation | None = None  # None until the prefill is complete
        self.written: list[int] = []
        self.resumed = replace(self.request, written=self.written)  # continues the written tokens

    @property
    def state(self) -> str:
        """Whether it is "waiting" for a row, "entering" it (in prefill), or "running"."""
        return "waiting" if self.row is None else "running" if self.generation else "entering"


@dataclass
class Scheduler:
    """Decodes jobs in its own thread, which starts at once; the limits are `ServeConfig`'s."""

    engine: Engine
    max_batch_size: int
    max_model_len: int
    max_queue: int

    def __post_init__(self) -> None:
        self.jobs = list[Job]()  # unfinished, by arrival; other threads only append
        self.changed = threading.Condition()  # to be held while appending
        self.idle = list(range(self.max_batch_size))  # free rows, the least recently used first
        self.read_tokens = 0  # by all prefills
        self.read_seconds = 0.0
        self.alone: Job | None = None  # the only one to be served after a failed step
        self.closing = False
        self.failure = ""  # the error that ended the decoding thread
        self.thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self.thread.start()

    @property
    def accepts(self) -> bool:
        """Whether it takes jobs: neither closing nor failed."""
        return self.thread.is_alive() and not self.closing and not self.failure

    @property
    def load(self) -> dict[str, int]:
        """The number of jobs in each state."""
        states = [job.state for job in list(self.jobs)]
        return {state: states.count(state) for state in ("running", "entering", "waiting")}

    def check(self, request: Request) -> None:
        """Errors: `PromptError` for a request that can never be served."""
        request.check_fits("this server's limit for both together is", self.max_model_len)
        self.engine.check(request)

    def submit(self, *jobs: Job) -> None:
        """Queue all of these jobs. Errors: `Busy` while the queue has no room for them;
        `PromptError` if it never has; `Closing` when the server shuts down or has failed."""
        with self.changed:
            if not self.accepts:
                raise Closing(self.failure or "the server is shutting down.")
            if len(jobs) > self.max_queue:
                raise PromptError(f"{len(jobs)} texts are more than max_queue={self.max_queue}.")
            waiting = self.load["waiting"]
            if waiting + len(jobs) > self.max_queue:
                raise Busy(
                    f"{waiting} requests wait already, and no more than {self.max_queue} can. Try "
                    "again later."
                )
            for job in jobs:
                job.arrived = time.monotonic()
            self.jobs += jobs
            self.changed.notify()

    def close(self, seconds: float) -> None:
        """Accept no more jobs, finish those there are, and cancel them after so many seconds."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(seconds)
        for job in list(self.jobs):
            job.cancelled = True
        self.thread.join()

    def _run(self) -> None:
        try:
            session = self._open()
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.jobs or self.closing)
                if not self.jobs:
                    return
                if not self._round(session):
                    session = self._recover()
        except Exception as error:  # no job may wait for a dead thread
            log.exception("decoding has failed")
            with self.changed:
                self.failure = f"decoding has failed: {type(error).__name__}: {error}"
            for job in list(self.jobs):
                self._end(job, STOPPED)

    def _open(self) -> Session:
        for _ in range(OPENINGS - 1):
            try:
                return self.engine.open(self.max_batch_size, self.max_model_len, Sampling())
            except Exception:
                log.exception("no session could be opened; it is tried again")
            time.sleep(PAUSE)
        return self.engine.open(self.max_batch_size, self.max_model_len, Sampling())

    def _served(self) -> list[Job]:
        return [job for job in list(self.jobs) if self.alone in (None, job)]

    def _round(self, session: Session) -> bool:
        """Prefill a chunk of one prompt, and step all texts. Returns whether that succeeded. (After
        the return, no traceback holds memory of the failed step.)"""
        try:
            for job in self._served():
                if job.cancelled or time.monotonic() > job.deadline:
                    self._end(job, CANCELLED if job.cancelled else TIMEOUT, session)
            self._prefill(session)
            self._step(session)
        except Exception:
            log.exception("a step has failed; each text goes on alone")
            return False
        return True

    def _recover(self) -> Session:
        """A new session after a failed step. Before, each text makes a step alone, and jobs that
        fail are ended."""
        for job in [job for job in self.jobs if job.row is not None]:
            self._leave(job)
            self.alone = job
            session = self._open()
            while job in self.jobs and (job.generation is None or len(job.generation.steps) < 2):
                if not self._round(session) and job in self.jobs:
                    self._end(job, FAILED)
            self._leave(job)
        self.alone = None
        return self._open()

    def _leave(self, job: Job) -> int | None:
        """Take a job from its row, and return the row, which the session has to stop."""
        row = job.row
        job.row = None
        job.prompt = job.generation = None
        if row is not None:
            self.idle.append(row)
        return row

    def _end(self, job: Job, failure: str, session: Session | None = None) -> None:
        row = self._leave(job)
        self.jobs.remove(job)
        self._notify(job, Event(StepRecord([]), finish=failure))
        if session is not None and row is not None:
            session.batch.stop(row)

    @contextmanager
    def _ending(self, session: Session, job: Job) -> Iterator[None]:
        """End only this job if an error occurs in the context."""
        try:
            yield
        except Exception:
            log.exception("a request has failed")
            self._end(job, FAILED, session)

    def _readable(self) -> list[Job]:
        states = ("entering", "waiting") if self.idle else ("entering",)
        return [job for job in self._served() if job.state in states]

    def _prefill(self, session: Session) -> None:
        """Read the next chunk of the prompt that is due first."""
        due: dict[Job, float] = {}
        for job in self._readable():
            with self._ending(session, job):
                if job.due is None:
                    text = job.resumed.text
                    unread = len(text) - session.match_prefix(0, text)[1]
                    seconds = self.read_seconds / max(self.read_tokens, 1)
                    job.due = job.arrived + unread * seconds
                due[job] = job.due
        if not due:
            return
        job = min(due, key=due.__getitem__)
        with self._ending(session, job):
            job.generation = generation = (job.prompt or self._admit(session, job)).advance()
            if generation is not None:
                self.read_tokens += len(job.resumed.text) - generation.reused
                self.read_seconds += generation.prefill_seconds
                self._record(job, generation, generation.steps[0])

    def _admit(self, session: Session, job: Job) -> Prompt:
        """Begin a job's prompt in the free row that it continues, else the least recently used."""
        shared = {row: session.batch.common_prefix(row, job.resumed.text) for row in self.idle}
        row = max(shared, key=shared.__getitem__)
        if 2 * shared[row] <= len(session.batch.texts[row]):
            row = self.idle[0]
        job.prompt = Prompt(session, row, job.resumed)
        job.row = row
        self.idle.remove(row)
        return job.prompt

    def _step(self, session: Session) -> None:
        """Step all texts. They draft nothing while a prompt can be read, since longer steps between
        its chunks would delay its first token."""
        running = [(job, job.generation) for job in self._served() if job.state == "running"]
        if not running:
            return
        records = session.step(drafts=not self._readable())
        for job, generation in running:
            assert job.row is not None and generation is not None
            with self._ending(session, job):
                session.record(job.row, records[job.row], job.request, generation)
                self._record(job, generation, records[job.row])

    def _record(self, job: Job, generation: Generation, record: StepRecord) -> None:
        """Notify a job of its step; after the last one, free its row."""
        reused = 0 if job.written else generation.reused
        job.written += record.tokens
        if generation.finish:
            self._leave(job)
            self.jobs.remove(job)
        self._notify(job, Event(record, generation.finish, reused))

    def _notify(self, job: Job, event: Event) -> None:
        try:
            job.notify(event)
        except Exception:
            log.exception("a request's client cannot be told of its steps; the request ends")
            job.cancelled = True
