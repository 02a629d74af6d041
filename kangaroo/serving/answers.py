"""From the steps of a job to what a client reads: text, OpenAI's objects, and errors."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from transformers import PreTrainedTokenizerBase

from kangaroo.engine.requests import Request
from kangaroo.engine.streaming import Pieces, UntilStop
from kangaroo.models.prompts import mended
from kangaroo.serving.jobs import Event, Job
from kangaroo.serving.metrics import Metrics, Usage
from kangaroo.serving.scheduler import Scheduler


@dataclass
class Piece:
    """Text of a choice that can be shown.

    Args:
        drafted: how many of its characters, its first ones, came with accepted draft tokens.
        finish: as OpenAI calls it, or how the job ended otherwise; empty where it goes on.
    """

    choice: int
    text: str
    drafted: int = 0
    finish: str = ""


@dataclass
class AnswerChoice:
    """One of the texts of an answer, as it grows."""

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
            self.finish = "stop" if event.finish == "eos" else event.finish  # as OpenAI calls it
            shown += self.until.push(self.pieces.end()) + self.until.end()
        self.text += shown
        return Piece(self.index, shown, len(drafted), self.finish)


@dataclass
class Answer:
    """The texts that a request gets, step by step; begun when it is made.

    Errors: those of `Scheduler.submit`.
    """

    scheduler: Scheduler
    tokenizer: PreTrainedTokenizerBase
    requests: Sequence[Request]
    deadline: float | None
    metrics: Metrics
    usage: Usage = field(init=False)
    choices: list[AnswerChoice] = field(init=False)

    def __post_init__(self) -> None:
        self.usage = Usage(len(self.requests[0].prompt))
        self.choices = [
            AnswerChoice(i, Pieces(self.tokenizer), UntilStop(request.stop))
            for i, request in enumerate(self.requests)
        ]
        loop, self.events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()

        def tell(index: int, event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

        self.jobs = [
            Job(request, lambda event, i=i: tell(i, event), self.deadline)  # type: ignore[misc]
            for i, request in enumerate(self.requests)
        ]
        self.scheduler.submit(*self.jobs)

    async def steps(self) -> AsyncGenerator[Piece, None]:
        """What can be shown after each step, timed, until all texts have ended."""
        histogram, last = self.metrics.first, time.perf_counter()
        while any(not choice.finish for choice in self.choices):
            index, event = await self.events.get()
            self.usage.add(index, event)
            piece, now = self.choices[index].push(event), time.perf_counter()
            histogram.observe(now - last)
            histogram, last = self.metrics.step, now
            yield piece

    def end(self) -> None:
        """End the texts that nobody will read, and count what was written."""
        for job, choice in zip(self.jobs, self.choices, strict=True):
            if not choice.finish:
                self.scheduler.cancel(job)
        self.metrics.ended(self.usage)


@dataclass
class Form:
    """How an answer is written down: OpenAI's object of a chat or of a completion."""

    model: str
    is_chat: bool

    def __post_init__(self) -> None:
        kind = "chatcmpl" if self.is_chat else "cmpl"
        self.id, self.created = f"{kind}-{secrets.token_hex(12)}", int(time.time())

    def _object(
        self, chat: str, choices: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        kind = chat if self.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        counts: dict[str, Any] = {}
        if usage:
            metrics = {"speculative_decoding": usage.drafts.as_json()}
            counts = {"usage": usage.as_json(), "metrics": metrics}
        return head | {"choices": choices} | counts

    def whole(self, answer: Answer) -> dict[str, Any]:
        """All choices."""
        choices = []
        for choice in answer.choices:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            text = {"message": message} if self.is_chat else {"text": choice.text}
            head = {"index": choice.index, "logprobs": None, "finish_reason": choice.finish}
            choices.append(head | text)
        return self._object("chat.completion", choices, answer.usage)

    def part(self, piece: Piece, first: bool, usage: Usage | None) -> dict[str, Any]:
        """What a step adds to a stream; with the counts so far, if they are wanted."""
        delta = ({"role": "assistant"} if first else {}) | {"content": piece.text}
        text = {"delta": delta} if self.is_chat else {"text": piece.text}
        head = {"index": piece.choice, "logprobs": None, "drafted": piece.drafted}
        choice = head | {"finish_reason": piece.finish or None} | text
        return self._object("chat.completion.chunk", [choice], usage)

    def last(self, usage: Usage) -> dict[str, Any]:
        """What a stream ends with where its counts are wanted."""
        return self._object("chat.completion.chunk", [], usage)


def event(content: dict[str, Any]) -> str:
    """As server-sent events have it; in ASCII, since some clients take more for ends of lines."""
    return f"data: {json.dumps(content)}\n\n"


def problem(status: int, message: str, code: str | None = None) -> JSONResponse:
    """An error as OpenAI's clients read it; without a code of theirs it has the status."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    message = mended(message)  # it may name what was sent
    error = {"message": message, "type": kind, "param": None, "code": code or status}
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse({"error": error}, status, headers)
