"""How answers are written down: OpenAI's objects, whole and as parts of a stream, and errors."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi.responses import JSONResponse

from kangaroo.models.prompts import mended
from kangaroo.serving.answers import Answer, Piece, Usage


def problem(status: int, message: str, code: str | None = None) -> JSONResponse:
    """An error as OpenAI's clients read it.

    Args:
        code: as OpenAI calls it; None is the status.
    """
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    message = mended(message)  # it may name what was sent
    told = {"message": message, "type": kind, "param": None, "code": code or status}
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return JSONResponse({"error": told}, status, headers)


def event(told: dict[str, Any]) -> str:
    """As server-sent events have it; in ASCII, since some clients take more for ends of lines."""
    return f"data: {json.dumps(told)}\n\n"


@dataclass
class Form(ABC):
    """How an answer is written down; of a whole one, and of a part of a stream."""

    model: str
    names: ClassVar[tuple[str, str, str]]  # an id's beginning; the object, whole and in parts

    def __post_init__(self) -> None:
        self.id, self.created = f"{self.names[0]}-{secrets.token_hex(12)}", int(time.time())

    def head(self, whole: bool) -> dict[str, Any]:
        """What all of them begin with."""
        kind = self.names[1] if whole else self.names[2]
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """All choices."""
        choices = [
            {"index": c.index, "logprobs": None, "finish_reason": c.finish} | self.said(c.text)
            for c in answer.choices
        ]
        return self.head(True) | {"choices": choices, "usage": counted(answer.usage)}

    def part(self, piece: Piece, first: bool, so_far: Usage | None = None) -> dict[str, Any]:
        """What a step adds; with the counts so far, if they are told."""
        choice = {
            "index": piece.choice,
            "logprobs": None,
            "finish_reason": piece.finish or None,
            "drafted": piece.drafted,
        }
        counts = {"usage": counted(so_far)} if so_far else {}
        return self.head(False) | {"choices": [choice | self.adds(piece.text, first)]} | counts

    def last(self, usage: Usage) -> dict[str, Any]:
        """What a stream ends with if it was asked for."""
        return self.head(False) | {"choices": [], "usage": counted(usage)}

    @abstractmethod
    def said(self, text: str) -> dict[str, Any]:
        """The text of a choice."""

    @abstractmethod
    def adds(self, text: str, first: bool) -> dict[str, Any]:
        """Text that is added to a choice."""


class AsText(Form):
    """Of completions."""

    names = ("cmpl", "text_completion", "text_completion")

    def said(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def adds(self, text: str, first: bool) -> dict[str, Any]:
        return {"text": text}


class AsChat(Form):
    """Of chats."""

    names = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def adds(self, text: str, first: bool) -> dict[str, Any]:
        return {"delta": ({"role": "assistant"} if first else {}) | {"content": text}}


def counted(usage: Usage) -> dict[str, Any]:
    """As OpenAI has it, with what became of drafts."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
        "rounds": usage.rounds,
    }
