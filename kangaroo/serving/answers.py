"""From the steps of a job to what a client reads: text, and counts of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from kangaroo.engine.requests import Request
from kangaroo.engine.streaming import Pieces, UntilStop
from kangaroo.serving.jobs import Event, Job
from kangaroo.serving.scheduler import Scheduler

REASONS = {"eos": "stop", "stop": "stop", "length": "length"}  # as OpenAI calls them


@dataclass
class Piece:
    """Text of a choice that became known.

    Args:
        drafted: how many of its characters came with tokens that were drafted and accepted; they
            are its first ones.
        finish: as OpenAI calls it, or how the job ended otherwise; empty where it goes on.
    """

    choice: int
    text: str
    drafted: int = 0
    finish: str = ""


@dataclass
class Usage:
    """Tokens of a request, all its choices together.

    Args:
        accepted, drafted: draft tokens.
        rounds: forwards of the target, the prompts' included.
        cached: tokens of the prompt that were in a row already; of several choices, the first's.
    """

    prompt: int
    completion: int = 0
    accepted: int = 0
    drafted: int = 0
    rounds: int = 0
    cached: int = 0

    def add(self, index: int, event: Event) -> None:
        """Count a step of a choice."""
        self.completion += len(event.tokens)
        self.accepted += event.accepted
        self.drafted += event.drafted
        self.rounds += bool(event.tokens)
        self.cached += 0 if index else event.reused


@dataclass
class Choice:
    """One of the texts that a client asked for, as it grows."""

    index: int
    pieces: Pieces
    until: UntilStop
    text: str = ""
    finish: str = ""

    def push(self, event: Event) -> Piece:
        """What a step adds that can be shown."""
        drafted = shown = ""
        for i, token in enumerate(event.tokens):
            text = self.until.push(self.pieces.push(token))
            shown += text
            if i < event.accepted:
                drafted += text
        if event.finish:
            self.finish = REASONS.get(event.finish, event.finish)
            shown += self.until.push(self.pieces.end()) + self.until.end()
        self.text += shown
        return Piece(self.index, shown, len(drafted), self.finish)


@dataclass
class Answer:
    """The texts that a request gets, step by step.

    Errors: those of `Scheduler.submit`, when it is begun.
    """

    scheduler: Scheduler
    tokenizer: PreTrainedTokenizerBase
    requests: Sequence[Request]
    deadline: float | None
    usage: Usage = field(init=False)
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.usage = Usage(len(self.requests[0].prompt))
        self.choices = [
            Choice(i, Pieces(self.tokenizer), UntilStop(request.stop))
            for i, request in enumerate(self.requests)
        ]

    def begin(self) -> None:
        """Let its texts wait for their rows."""
        loop, self.events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def told(index: int, event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

        self.jobs = [
            Job(request, lambda event, i=i: told(i, event), self.deadline)  # type: ignore[misc]
            for i, request in enumerate(self.requests)
        ]
        self.scheduler.submit(*self.jobs)

    async def steps(self) -> AsyncGenerator[Piece, None]:
        """What becomes known, until all texts have ended."""
        while any(not choice.finish for choice in self.choices):
            index, event = await self.events.get()
            self.usage.add(index, event)
            yield self.choices[index].push(event)

    def end(self) -> None:
        """End the texts that nobody will read; nothing where all have ended."""
        for job, choice in zip(self.jobs, self.choices, strict=True):
            if not choice.finish:
                self.scheduler.cancel(job)
