"""From the steps of a job to what a client reads: text, OpenAI's objects, and errors."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi.responses import JSONResponse

from kangaroo.engine.requests import Request
from kangaroo.engine.streaming import Pieces, UntilStop
from kangaroo.models.prompts import Tokenizer, sanitized
from kangaroo.serving.metrics import Metrics, Usage
from kangaroo.serving.scheduler import Event, Job, Scheduler


@dataclass
class AnswerChoice:
    """One of the texts of an answer, as it grows; `finish` is as OpenAI calls it, or how the job
    ended otherwise."""

    index: int
    pieces: Pieces
    until: UntilStop
    text: str = ""
    finish: str = ""
    streamed: bool = False

    def push(self, event: Event) -> tuple[str, int]:
        """What a step adds that can be shown, and how many of its characters, its first ones, came
        with accepted draft tokens."""
        drafted = shown = ""
        for i, token in enumerate(event.tokens):
            text = self.until.push(self.pieces.push(token))
            shown += text
            if i < event.accepted:
                drafted += text
        if event.finish:
            self.finish = "stop" if event.finish == "eos" else event.finish
            shown += self.until.push(self.pieces.end()) + self.until.end()
        self.text += shown
        return shown, len(drafted)


@dataclass
class Answer:
    """The texts that a request gets, step by step, and how they are written down: as OpenAI's
    objects of a chat or of a completion. It begins when it is made. Errors: as `Scheduler.submit`.
    """

    scheduler: Scheduler
    tokenizer: Tokenizer
    requests: Sequence[Request]
    deadline: float
    metrics: Metrics
    model: str
    is_chat: bool

    def __post_init__(self) -> None:
        self.usage = Usage(len(self.requests[0].prompt))
        self.choices = [
            AnswerChoice(i, Pieces(self.tokenizer), UntilStop(request.stop))
            for i, request in enumerate(self.requests)
        ]
        kind = "chatcmpl" if self.is_chat else "cmpl"
        self.id, self.created = f"{kind}-{secrets.token_hex(12)}", int(time.time())
        loop, self.events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def tell(index: int, event: Event) -> None:
            loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

        self.jobs = [
            Job(request, partial(tell, i), self.deadline) for i, request in enumerate(self.requests)
        ]
        self.scheduler.submit(*self.jobs)

    async def steps(self) -> AsyncGenerator[tuple[AnswerChoice, str, int], None]:
        """What can be shown of a choice after each step, timed, until all texts have ended."""
        histogram, last = self.metrics.first, time.perf_counter()
        while any(not choice.finish for choice in self.choices):
            index, event = await self.events.get()
            self.usage.add(index, event)
            shown, now = self.choices[index].push(event), time.perf_counter()
            histogram.observe(now - last)
            histogram, last = self.metrics.step, now
            yield self.choices[index], *shown

    def cancel(self) -> None:
        """Nobody will read the texts."""
        for job in self.jobs:
            job.cancelled = True

    def end(self) -> None:
        """Whatever has become of it; what was written is counted."""
        self.cancel()
        self.metrics.ended(self.usage)

    def whole(self) -> dict[str, Any]:
        """All choices."""
        choices = []
        for choice in self.choices:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            text = {"message": message} if self.is_chat else {"text": choice.text}
            head = {"index": choice.index, "logprobs": None, "finish_reason": choice.finish}
            choices.append(head | text)
        return self._object("chat.completion", choices, counted=True)

    def part(self, choice: AnswerChoice, text: str, drafted: int, counted: bool) -> dict[str, Any]:
        """What a step adds to a stream; with the counts so far, if they are wanted."""
        delta = ({} if choice.streamed else {"role": "assistant"}) | {"content": text}
        choice.streamed = True
        part: dict[str, Any] = {"delta": delta} if self.is_chat else {"text": text}
        part |= {"index": choice.index, "logprobs": None, "drafted": drafted}
        return self.chunk([part | {"finish_reason": choice.finish or None}], counted)

    def chunk(self, choices: list[dict[str, Any]], counted: bool) -> dict[str, Any]:
        """A part of a stream."""
        return self._object("chat.completion.chunk", choices, counted)

    def _object(self, chat: str, choices: list[dict[str, Any]], counted: bool) -> dict[str, Any]:
        kind = chat if self.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices} | (self.usage.as_json() if counted else {})


def event(content: dict[str, Any]) -> str:
    """As server-sent events have it; in ASCII, since some clients take more for ends of lines."""
    return f"data: {json.dumps(content)}\n\n"


def problem(status: int, message: str, code: str | None = None) -> JSONResponse:
    """An error as OpenAI's clients read it; without a code of theirs it has the status."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    message = sanitized(message)  # it may name what was sent
    error = {"message": message, "type": kind, "param": None, "code": code or status}
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse({"error": error}, status, headers)
