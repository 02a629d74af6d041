"""One thread decodes for all: requests wait for a row, enter it in parts, and are stepped together.

Of the prompts that can be read, the next part is one of that whose first token is due first: as
long after it arrived as it takes to read alone. So a short prompt does not wait for a long one that
came just before it, and a long one is overtaken by those alone that arrive while it could be read.

What happens to a job is told to it from that thread; it may be cancelled from any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from kangaroo.batch import Batch
from kangaroo.engine import Engine
from kangaroo.errors import KangarooError
from kangaroo.generation import Generation, Request, StepRecord
from kangaroo.sampling import Sampling

log = logging.getLogger(__name__)

CANCELLED, TIMEOUT, FAILED = "cancelled", "timeout", "failed"  # how a job can end, beside a text


class Busy(KangarooError):
    """No more requests can wait."""


class Closing(KangarooError):
    """The server takes no more requests."""


@dataclass
class Event:
    """A step of a job.

    Args:
        tokens: what was written.
        accepted: how many of them were draft tokens: the first ones.
        drafted: how many were proposed.
        finish: how the job ended: "eos", "length", "stop", or one of this module; empty where it
            goes on.
        reused: of the first step, tokens of the prompt that were in the cache already.
    """

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
        deadline: by `time.monotonic`, after which the job ends as it is; None is never.

    Attributes:
        arrived: when it was submitted, by the same clock.
        due: when its first token is due; None until that is asked.
    """

    request: Request
    tell: Callable[[Event], object]
    deadline: float | None = None
    cancelled: bool = False
    arrived: float = field(default=0.0, init=False)
    due: float | None = field(default=None, init=False)

    @property
    def over(self) -> str:
        """Why the job should end before its text does; empty if it should not."""
        if self.cancelled:
            return CANCELLED
        late = self.deadline is not None and time.monotonic() > self.deadline
        return TIMEOUT if late else ""


@dataclass
class Entering:
    """A prompt on its way into a row."""

    job: Job
    row: int
    parts: Generator[None, None, Generation]


@dataclass
class Load:
    """How much there is to do: texts that are written, that enter, and that wait."""

    running: int
    entering: int
    waiting: int


@dataclass
class Scheduler:
    """Decodes jobs as they come.

    Args:
        rows: texts that are written at the same time.
        longest: tokens of a text, prompt included.
        most_waiting: jobs that wait for a row; one more is refused.
    """

    engine: Engine
    rows: int
    longest: int
    most_waiting: int
    failure: str = ""
    waiting: deque[Job] = field(default_factory=deque)
    running: dict[int, tuple[Job, Generation]] = field(default_factory=dict)
    entering: list[Entering] = field(default_factory=list)
    read_tokens: int = 0  # of prompts that have entered
    read_seconds: float = 0.0  # which that took
    closing: bool = False
    abandoning: bool = False

    def __post_init__(self) -> None:
        self.idle = list(range(self.rows))  # free rows, the one that was written longest ago first
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
    def load(self) -> Load:
        """How much there is to do now."""
        return Load(len(self.running), len(self.entering), len(self.waiting))

    def check(self, request: Request) -> None:
        """Errors: `PromptError` for a request that can never be served."""
        self.engine.check(request)
        request.check_fits("this server's limit for both together is", self.longest)

    def submit(self, *jobs: Job) -> None:
        """Let jobs wait for a row, all of them or none.

        Errors: `Busy` where too many wait already; `Closing` when the server ends or has failed.
        """
        with self.changed:
            if self.closing or not self.alive:
                raise Closing(self.failure or "the server is shutting down.")
            if len(self.waiting) + len(jobs) > self.most_waiting:
                raise Busy(
                    f"{len(self.waiting)} requests wait already, and no more than "
                    f"{self.most_waiting} can. Try again later."
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
        entering = [entering.job for entering in self.entering]
        return [*self.waiting, *entering, *(job for job, _ in self.running.values())]

    def _run(self) -> None:
        try:
            batch = self.engine.open(self.rows, self.longest, Sampling())
            while self._wait():
                self._drop(batch)
                self._enter(batch)
                if self.running:
                    self._step(batch)
        except Exception as error:  # no job may wait for a thread that is gone
            log.exception("decoding has failed")
            self.failure = f"decoding has failed: {type(error).__name__}: {error}"
            with self.changed:
                left = self._jobs()
                self.waiting.clear()
                self.entering.clear()
                self.running.clear()
            for job in left:
                job.tell(Event([], finish=FAILED))

    def _wait(self) -> bool:
        """Until there is something to do; false when there will be nothing more."""
        with self.changed:
            while not self._jobs():
                if self.closing:
                    return False
                self.changed.wait()
        return True

    def _drop(self, batch: Batch) -> None:
        """End the jobs that should end before their texts do."""
        with self.changed:
            if self.abandoning:
                for job in self._jobs():
                    job.cancelled = True
            ended = {job: job.over for job in self._jobs() if job.over}
            self.waiting = deque(job for job in self.waiting if job not in ended)
        for row, (job, _) in list(self.running.items()):
            if job in ended:
                batch.stop(row)
                self._free(row)
        for entering in [entering for entering in self.entering if entering.job in ended]:
            entering.parts.close()
            self.idle.append(entering.row)
            self.entering.remove(entering)
        for job, why in ended.items():
            job.tell(Event([], finish=why))

    def _enter(self, batch: Batch) -> None:
        """A part of a prompt enters its row, if there is one that can be read."""
        with self.changed:
            waiting = list(self.waiting) if self.idle else []
        jobs = [*(entering.job for entering in self.entering), *waiting]
        if not jobs:
            return
        job = min(jobs, key=lambda job: self._due(batch, job))
        if job in waiting:
            self._admit(batch, job)
        entering = next(entering for entering in self.entering if entering.job is job)
        try:
            next(entering.parts)
        except StopIteration as entered:
            self.entering.remove(entering)
            generation = entered.value
            self.running[entering.row] = job, generation
            self.read_tokens += len(job.request.prompt) - generation.reused
            self.read_seconds += generation.prefill_seconds
            self._told(entering.row, generation.steps[0])

    def _due(self, batch: Batch, job: Job) -> float:
        """When a job's first token is due, by what prompts have taken so far."""
        if job.due is None:
            _, known = self.engine.known(batch, 0, job.request.prompt)
            unread = len(job.request.prompt) - known
            job.due = job.arrived + unread * self.read_seconds / max(self.read_tokens, 1)
        return job.due

    def _admit(self, batch: Batch, job: Job) -> None:
        """A job that waits takes a free row."""
        row = self._row_for(batch, job.request)  # nobody who submits waits for this
        with self.changed:
            self.waiting.remove(job)
        self.idle.remove(row)
        self.entering.append(Entering(job, row, self.engine.admitting(batch, row, job.request)))

    def _row_for(self, batch: Batch, request: Request) -> int:
        """The free row of a text that the prompt goes on from; where there is none, the row that
        was written longest ago, so that others may still be gone on from."""
        known = {row: batch.shared(row, request.prompt) for row in self.idle}
        best = max(known, key=known.__getitem__)
        return best if 2 * known[best] > len(batch.texts[best]) else self.idle[0]

    def _free(self, row: int) -> None:
        del self.running[row]
        self.idle.append(row)

    def _step(self, batch: Batch) -> None:
        """One round of all texts. Nothing is drafted while a prompt enters, or waits though a row
        is free for it: with longer steps between the parts of prompts, first tokens would be later.
        """
        with self.changed:
            prompts = bool(self.entering) or (bool(self.idle) and bool(self.waiting))
        records = self.engine.step(batch, drafts=not prompts)
        for row, (job, generation) in list(self.running.items()):
            self.engine.record(batch, row, records[row], job.request, generation)
            self._told(row, records[row])

    def _told(self, row: int, record: StepRecord) -> None:
        """A job hears of its step; where that was the last, its row is free."""
        job, generation = self.running[row]
        if generation.finish:
            self._free(row)
        reused = generation.reused if len(generation.steps) == 1 else 0
        counts = record.accepted, record.drafted
        job.tell(Event(list(record.tokens), *counts, generation.finish, reused))
