"""What a scheduler is given to decode, and what it tells of it."""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from kangaroo.engine.requests import Generation, Request
from kangaroo.utils.errors import KangarooError

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
    `drafted` draft tokens. `finish` is how the job ended: "eos", "length", "stop", or one of this
    module; empty where it goes on. Of the first step, so many tokens of the prompt were `reused`:
    in the cache already."""

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

    Attributes:
        cancelled: set by anybody, from any thread, to end the job.
        arrived: when it was submitted, by the same clock.
        due: when its first token is due; None until that is asked.
        row: where it is decoded; None while it waits.
        parts: its prompt on its way into the row.
        generation: what it writes there; None until the prompt has entered.
        written: the tokens that were told.
        suspect: whether a step failed that it took part in, and it has not made one alone since.
    """

    request: Request
    tell: Callable[[Event], object]
    deadline: float = math.inf
    cancelled: bool = field(default=False, init=False)
    arrived: float = field(default=0.0, init=False)
    due: float | None = field(default=None, init=False)
    row: int | None = field(default=None, init=False)
    parts: Generator[None, None, Generation] | None = field(default=None, init=False)
    generation: Generation | None = field(default=None, init=False)
    written: list[int] = field(default_factory=list, init=False)
    suspect: bool = field(default=False, init=False)

    @property
    def state(self) -> str:
        """Where it is: "waiting" for a row, "entering" it with its prompt, or "running"."""
        return "waiting" if self.row is None else "running" if self.generation else "entering"

    @property
    def text(self) -> list[int]:
        """The prompt and what was written: what enters a row."""
        return [*self.request.prompt, *self.written]
