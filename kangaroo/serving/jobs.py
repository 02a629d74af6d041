"""What a scheduler is given to decode, and what it tells of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from kangaroo.engine.requests import Generation, Request
from kangaroo.utils.errors import KangarooError

# How a job can end, beside a text. The last: because nothing is decoded any more.
CANCELLED, TIMEOUT, FAILED, STOPPED = "cancelled", "timeout", "failed", "stopped"


class Busy(KangarooError):
    """No more requests can wait."""


class Closing(KangarooError):
    """The server takes no more requests."""


@dataclass
class Event:
    """A step of a job."""

    tokens: list[int]  # what was written
    accepted: int = 0  # how many of them, the first ones, were draft tokens
    drafted: int = 0  # how many were proposed
    finish: str = ""  # "eos", "length", "stop", or one of this module's; empty where it goes on
    reused: int = 0  # of the first step, tokens of the prompt that were in the cache already


@dataclass(eq=False)
class Job:
    """A request and who is told about it.

    Args:
        tell: called in the engine's thread, once for every step; it must return at once.
        deadline: by `time.monotonic`, after which the job ends as it is; None is never.
    """

    request: Request
    tell: Callable[[Event], object]
    deadline: float | None = None
    cancelled: bool = False
    arrived: float = field(default=0.0, init=False)  # when it was submitted, by the same clock
    due: float | None = field(default=None, init=False)  # when its first token is due
    row: int | None = field(default=None, init=False)  # None while it waits
    # its prompt on its way into the row; what it writes there, once that has entered
    parts: Generator[None, None, Generation] | None = field(default=None, init=False)
    generation: Generation | None = field(default=None, init=False)

    @property
    def over(self) -> str:
        """Why the job should end before its text does; empty if it should not."""
        if self.cancelled:
            return CANCELLED
        late = self.deadline is not None and time.monotonic() > self.deadline
        return TIMEOUT if late else ""
