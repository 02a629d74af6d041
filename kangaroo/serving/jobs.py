"""What a scheduler is given to decode, and what it tells of it."""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass

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
        # whether a step failed that it took part in, and it has not made one alone since
        self.suspect = False

    @property
    def state(self) -> str:
        """Where it is: "waiting" for a row, "entering" it with its prompt, or "running"."""
        return "waiting" if self.row is None else "running" if self.generation else "entering"

    @property
    def text(self) -> list[int]:
        """The prompt and what was written: what enters a row."""
        return [*self.request.prompt, *self.written]
