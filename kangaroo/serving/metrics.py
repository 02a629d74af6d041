"""What is counted: the tokens of a request, and what Prometheus reads of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kangaroo.serving.jobs import Event

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


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

    def as_json(self) -> dict[str, Any]:
        """OpenAI's `usage`, with what became of drafts."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
            "rounds": self.rounds,
        }


class Metrics:
    """Counts of one server, in a registry that is not the process's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        here: dict[str, Any] = {"registry": self.registry}
        timed = here | {"buckets": SECONDS}
        self.requests = Counter("kangaroo_requests", "Answers by status.", ["status"], **here)
        self.tokens = Counter("kangaroo_tokens", "Tokens, by kind.", ["kind"], **here)
        self.texts = Gauge("kangaroo_texts", "Texts, by state.", ["state"], **here)
        self.first = Histogram("kangaroo_first_token_seconds", "Until the first token.", **timed)
        self.step = Histogram("kangaroo_step_seconds", "Between two steps of a text.", **timed)

    def ended(self, usage: Usage) -> None:
        """A request has ended, one way or another."""
        for kind in ("prompt", "cached", "completion", "drafted", "accepted"):
            self.tokens.labels(kind).inc(getattr(usage, kind))

    def show(self, load: dict[str, int]) -> bytes:
        """All of it as text."""
        for state, texts in load.items():
            self.texts.labels(state).set(texts)
        return generate_latest(self.registry)
