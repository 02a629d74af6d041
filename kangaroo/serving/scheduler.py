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

import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kangaroo.engine.batch import Batch
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request, StepRecord
from kangaroo.engine.sampling import Sampling
from kangaroo.utils.errors import KangarooError

log = logging.getLogger(__name__)

OPENINGS = 3  # of a batch before decoding ends: memory may become free meanwhile
PAUSE = 0.2  # seconds between two of them
# How a job can end, beside a text. The last: because nothing is decoded any more.
CANCELLED, TIMEOUT, FAILED, STOPPED = "cancelled", "timeout", "failed", "stopped"


class Busy(KangarooError):
    """No more requests can wait."""

    status = 429  # of the answer


class Closing(KangarooError):
    """The server takes no more requests."""

    status = 503


@dataclass
class Event:
    """A step of a job: the tokens that were written, `accepted` of them, the first ones, of
    `drafted` draft tokens. `finish` is how the job ended: "eos", "length", "stop", or one of those
    above; empty where it goes on. Of the first step, so many tokens of the prompt were `reused`: in
    the cache already."""

    tokens: list[int]
    accepted: int = 0
    drafted: int = 0
    finish: str = ""
    reused: int = 0


@dataclass(eq=False)
class Job:
    """A request and who is told about it.

    Args:
        tell: called in the engine's thread, once for every step; it must return at once.
        deadline: by `time.monotonic`, after which the job ends as it is.
    """

    request: Request
    tell: Callable[[Event], object]
    deadline: float = math.inf

    def __post_init__(self) -> None:
        self.cancelled = False  # set by anybody, from any thread, to end the job
        self.arrived = 0.0  # when it was submitted, by the same clock
        self.due: float | None = None  # when its first token is due; None until that is asked
        self.row: int | None = None  # where it is decoded; None while it waits
        # its prompt on its way there
        self.parts: Generator[Generation | None, None, None] | None = None
        self.generation: Generation | None = None  # None until the prompt has entered
        self.written: list[int] = []  # the tokens that were told
        self.resumed = replace(self.request, written=self.written)  # goes on from all of them
        # whether a step failed that it took part in, and it has not made one alone since
        self.suspect = False

    @property
    def state(self) -> str:
        """Where it is: "waiting" for a row, "entering" it with its prompt, or "running"."""
        return "waiting" if self.row is None else "running" if self.generation else "entering"


@dataclass
class Scheduler:
    """Decodes jobs as they come, in a thread of its own, from when it is made; the limits are those
    of `ServeConfig`.

    Attributes:
        jobs: those that have not ended, as they came. Any thread adds some, under `changed`; all
            else that becomes of them is the business of the thread that decodes.
        idle: free rows, the one that was written longest ago first.
        read_tokens, read_seconds: of prompts that have entered, and which that took.
        failure: why nothing is decoded any more.
    """

    engine: Engine
    max_batch_size: int
    max_model_len: int
    max_queue: int

    def __post_init__(self) -> None:
        self.jobs, self.read_tokens, self.read_seconds = list[Job](), 0, 0.0
        self.closing, self.failure = False, ""
        self.idle = list(range(self.max_batch_size))
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self.thread.start()

    @property
    def alive(self) -> bool:
        """Whether jobs are decoded."""
        return self.thread.is_alive() and not self.failure

    @property
    def load(self) -> dict[str, int]:
        """How many texts are written, enter, and wait."""
        states = [job.state for job in list(self.jobs)]
        return {state: states.count(state) for state in ("running", "entering", "waiting")}

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
            if (waiting := self.load["waiting"]) + len(jobs) > self.max_queue:
                raise Busy(
                    f"{waiting} requests wait already, and no more than {self.max_queue} can. Try "
                    "again later."
                )
            for job in jobs:
                job.arrived = time.monotonic()
            self.jobs += jobs
            self.changed.notify()

    def close(self, seconds: float) -> None:
        """Take no more jobs, and finish those that there are; cancel what is left after so many
        seconds."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join(seconds)
        for job in list(self.jobs):
            job.cancelled = True
        self.thread.join()

    def _run(self) -> None:
        try:
            batch = self._open()
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.jobs or self.closing)
                if not self.jobs:  # and there will be nothing more
                    return
                if not self._round(batch):
                    self._suspect()
                    batch = self._open()
        except Exception as error:  # no job may wait for a thread that is gone
            log.exception("decoding has failed")
            with self.changed:
                self.failure = f"decoding has failed: {type(error).__name__}: {error}"
            for job in list(self.jobs):
                self._end(job, STOPPED)

    def _open(self) -> Batch:
        for _ in range(OPENINGS - 1):
            try:
                return self.engine.open(self.max_batch_size, self.max_model_len, Sampling())
            except Exception:
                log.exception("no batch could be opened; once more")
            time.sleep(PAUSE)
        return self.engine.open(self.max_batch_size, self.max_model_len, Sampling())

    def _round(self, batch: Batch) -> bool:
        """A part of a prompt and a step of all texts. Returns whether the batch is as it should be;
        when this has returned, nothing holds what an error's traceback did."""
        try:
            for job in list(self.jobs):
                if job.cancelled or time.monotonic() > job.deadline:
                    self._end(job, CANCELLED if job.cancelled else TIMEOUT, batch)
            self._enter(batch)
            self._step(batch)
        except Exception:
            log.exception("a step has failed; each text goes on alone")
            return False
        return True

    def _suspect(self) -> None:
        """All jobs leave their rows, to go on alone. One that was alone is ended."""
        for job in [job for job in self.jobs if job.row is not None]:
            if job.suspect:
                self._end(job, FAILED)
            else:
                self._leave(job)
                job.suspect = True

    def _leave(self, job: Job) -> int | None:
        """A job leaves its row, which is returned: the batch has to stop that."""
        row, job.row = job.row, None
        job.parts = job.generation = None
        if row is not None:
            self.idle.append(row)
        return row

    def _end(self, job: Job, why: str, batch: Batch | None = None) -> None:
        """A job ends before its text does."""
        row = self._leave(job)
        self.jobs.remove(job)
        self._tell(job, Event([], finish=why))
        if batch is not None and row is not None:
            batch.stop(row)

    @contextmanager
    def _blaming(self, batch: Batch, job: Job) -> Iterator[None]:
        """What fails here fails for this job alone."""
        try:
            yield
        except Exception:
            log.exception("a request has failed")
            self._end(job, FAILED, batch)

    def _readable(self) -> list[Job]:
        """Jobs whose prompts can be read now; a suspect is alone in the batch."""
        jobs = list(self.jobs)
        waiting = [job for job in jobs if job.state == "waiting"]
        entering = [job for job in jobs if job.state == "entering"]
        if suspects := [job for job in jobs if job.suspect]:
            return entering if len(waiting) < len(jobs) else suspects[:1]
        return entering + (waiting if self.idle else [])

    def _enter(self, batch: Batch) -> None:
        """A part of a prompt enters its row, if there is one that can be read."""
        due: dict[Job, float] = {}
        for job in self._readable():
            with self._blaming(batch, job):
                if job.due is None:  # by what prompts have taken so far
                    text = job.resumed.text
                    unread = len(text) - self.engine.match_prefix(batch, 0, text)[1]
                    seconds = self.read_seconds / max(self.read_tokens, 1)
                    job.due = job.arrived + unread * seconds
                due[job] = job.due
        if not due:
            return
        job = min(due, key=due.__getitem__)
        with self._blaming(batch, job):
            job.generation = generation = next(job.parts or self._admit(batch, job))
            if generation is not None:
                self.read_tokens += len(job.resumed.text) - generation.reused
                self.read_seconds += generation.prefill_seconds
                self._record(job, generation, generation.steps[0])

    def _admit(self, batch: Batch, job: Job) -> Generator[Generation | None, None, None]:
        """A job that waits goes on from what it has written, in the free row of a text that it goes
        on from; where there is none, in the one that was written longest ago, so that others may
        still be gone on from. Returns the parts of its prompt."""
        shared = {row: batch.common_prefix(row, job.resumed.text) for row in self.idle}
        row = max(shared, key=shared.__getitem__)
        if 2 * shared[row] <= len(batch.texts[row]):
            row = self.idle[0]
        job.parts = self.engine.prefill_chunks(batch, row, job.resumed)
        job.row = row
        self.idle.remove(row)
        return job.parts

    def _step(self, batch: Batch) -> None:
        """One round of all texts. Nothing is drafted while a prompt enters, or waits though a row
        is free for it: with longer steps between the parts of prompts, first tokens would be later.
        A suspect drafts, since that may be what failed."""
        running = [(job, job.generation) for job in self.jobs if job.state == "running"]
        if not running:
            return
        suspect = running[0][0] if running[0][0].suspect else None
        load = self.load
        prompts = load["entering"] or (self.idle and load["waiting"])
        records = self.engine.step(batch, drafts=suspect is not None or not prompts)
        for job, generation in running:
            assert job.row is not None and generation is not None
            with self._blaming(batch, job):
                self.engine.record(batch, job.row, records[job.row], job.request, generation)
                self._record(job, generation, records[job.row])
        if suspect is not None:  # it has made a step alone
            suspect.suspect, row = False, suspect.row
            if row is not None and any(job.suspect for job in self.jobs):
                self._leave(suspect)  # and waits for the others
                batch.stop(row)

    def _record(self, job: Job, generation: Generation, record: StepRecord) -> None:
        """A job hears of its step; where that was the last, its row is free."""
        reused = 0 if job.written else generation.reused
        job.written += record.tokens
        if generation.finish:
            self._leave(job)
            self.jobs.remove(job)
        step = record.tokens, record.accepted, record.drafted
        self._tell(job, Event(*step, generation.finish, reused))

    def _tell(self, job: Job, event: Event) -> None:
        """Whoever cannot be told has gone."""
        try:
            job.tell(event)
        except Exception:
            log.exception("nobody hears of a request any more")
            job.cancelled = True
