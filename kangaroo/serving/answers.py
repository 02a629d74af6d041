"""Turns the events of jobs into responses: text, OpenAI's objects with logprobs, and errors."""

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi.responses import JSONResponse

from kangaroo.engine.requests import Request, StepRecord
from kangaroo.engine.streaming import Pieces
from kangaroo.models.prompts import Tokenizer, plain_text, sanitized, token_bytes
from kangaroo.serving.metrics import Metrics, Usage
from kangaroo.serving.scheduler import Event, Job, Scheduler

UNLIKELY = -9999.0  # in OpenAI's API, that of a token which is not among the likeliest


@dataclass
class Logprobs:
    """The log-probabilities of an answer's tokens, by the target's distribution before
    temperature and filters, but under the restriction of a text that has one.

    Args:
        top: how many of the likeliest tokens are listed for each token.
        is_chat: whether the object is a chat's, or a completion's.
    """

    tokenizer: Tokenizer
    top: int
    is_chat: bool

    def __post_init__(self) -> None:
        self.tokens = list[dict[str, Any]]()  # each with its own logprob and those of the likeliest
        self.offset = 0  # characters of the tokens before, for completions

    def add(self, step: StepRecord, ends_with_eos: bool) -> None:
        """Take a step's tokens, without an EOS, which is no part of the text."""
        assert step.topk is not None
        for token, record in zip(step.tokens, step.topk, strict=False):
            pairs = zip(record["tokens"].tolist(), record["chances"].tolist(), strict=True)
            logprobs = {other: math.log(x) for other, x in pairs if x > 0}  # 0 is forbidden
            entry = self._entry(token, logprobs.get(token, UNLIKELY))
            entries = [self._entry(other, logprob) for other, logprob in logprobs.items()]
            self.tokens.append(entry | {"top_logprobs": entries[: self.top]})
        if ends_with_eos:
            self.tokens.pop()

    def taken(self) -> dict[str, Any]:
        """The object for the tokens since the last call."""
        tokens, self.tokens = self.tokens, []
        if self.is_chat:
            return {"content": tokens, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {x["token"]: x["logprob"] for x in token["top_logprobs"]} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = plain_text(self.tokenizer, [token])
        return {"token": text, "logprob": logprob, "bytes": token_bytes(self.tokenizer, token)}


@dataclass
class AnswerChoice:
    """A growing text of an answer; `finish` is OpenAI's finish reason, or how the job failed."""

    index: int
    pieces: Pieces
    logprobs: Logprobs | None
    text: str = ""
    finish: str = ""
    streamed: bool = False

    def push(self, event: Event) -> tuple[str, int]:
        """The text that a step adds, and how many of its first characters were drafted."""
        new_text = ""
        drafted = 0
        for i, token in enumerate(event.step.tokens):
            new_text += self.pieces.push(token)
            if i < event.step.accepted:
                drafted = len(new_text)
        if self.logprobs is not None and event.step.tokens:
            self.logprobs.add(event.step, ends_with_eos=event.finish == "eos")
        if event.finish:
            self.finish = "stop" if event.finish == "eos" else event.finish
            new_text += self.pieces.end()
        self.text += new_text
        return new_text, drafted


@dataclass
class Answer:
    """The texts for a request, as OpenAI's objects of a chat or a completion. Creating an answer
    submits its jobs. Errors: as `Scheduler.submit`."""

    scheduler: Scheduler
    tokenizer: Tokenizer
    requests: Sequence[Request]
    n: int  # of each prompt, one prompt after the other
    deadline: float
    metrics: Metrics
    model: str
    is_chat: bool
    logprobs: int | None  # for how many likeliest tokens, if any are asked for

    def __post_init__(self) -> None:
        self.usage = Usage(sum(len(request.prompt) for request in self.requests[:: self.n]))
        kind = "chatcmpl" if self.is_chat else "cmpl"
        self.id = f"{kind}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        loop = asyncio.get_running_loop()
        self.events = asyncio.Queue[tuple[int, Event]]()

        def notify(index: int, event: Event) -> None:
            loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

        self.choices = list[AnswerChoice]()
        self.jobs = list[Job]()
        for i, request in enumerate(self.requests):
            logprobs = None
            if self.logprobs is not None:
                logprobs = Logprobs(self.tokenizer, self.logprobs, self.is_chat)
            self.choices.append(AnswerChoice(i, Pieces(self.tokenizer, request.stop), logprobs))
            self.jobs.append(Job(request, partial(notify, i), self.deadline))
        self.scheduler.submit(*self.jobs)

    async def steps(self) -> AsyncGenerator[tuple[AnswerChoice, str, int], None]:
        """After each step, the choice, its new text, and how much of that was drafted."""
        histogram = self.metrics.first
        last = time.perf_counter()
        while any(not choice.finish for choice in self.choices):
            index, event = await self.events.get()
            self.usage.add(index % self.n, event)
            text, drafted = self.choices[index].push(event)
            now = time.perf_counter()
            histogram.observe(now - last)
            histogram = self.metrics.step
            last = now
            yield self.choices[index], text, drafted

    def cancel(self) -> None:
        """Stop decoding the texts."""
        for job in self.jobs:
            job.cancelled = True

    def end(self) -> None:
        """Stop decoding, and count what was written."""
        self.cancel()
        self.metrics.count(self.usage)

    def full(self) -> dict[str, Any]:
        """The answer with all choices."""
        choices = []
        for choice in self.choices:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            text = {"message": message} if self.is_chat else {"text": choice.text}
            logprobs = choice.logprobs and choice.logprobs.taken()
            head = {"index": choice.index, "logprobs": logprobs, "finish_reason": choice.finish}
            choices.append(head | text)
        answer = self.as_json(choices, with_usage=True)
        return answer | {"object": "chat.completion"} if self.is_chat else answer

    def part(self, choice: AnswerChoice, text: str, drafted: int) -> dict[str, Any]:
        """A choice's part of a stream, with the text of one step."""
        delta = ({} if choice.streamed else {"role": "assistant"}) | {"content": text}
        choice.streamed = True
        part: dict[str, Any] = {"delta": delta} if self.is_chat else {"text": text}
        logprobs = choice.logprobs and choice.logprobs.taken()
        part |= {"index": choice.index, "logprobs": logprobs, "drafted": drafted}
        return part | {"finish_reason": choice.finish or None}

    def as_json(self, choices: list[dict[str, Any]], with_usage: bool) -> dict[str, Any]:
        """OpenAI's object of a stream with these choices."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices} | (self.usage.as_json() if with_usage else {})


def server_sent_event(content: dict[str, Any]) -> str:
    """A server-sent event, in ASCII, since some clients take Unicode's line separators for ends."""
    return f"data: {json.dumps(content)}\n\n"


def error_response(status: int, message: str, code: str | None = None) -> JSONResponse:
    """An error in OpenAI's format; `code` defaults to the status."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    # the message may quote broken text of the request
    error = {"message": sanitized(message), "type": kind, "param": None, "code": code or status}
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse({"error": error}, status, headers)
