"""What is counted: the tokens of a request, and what Prometheus reads of a server."""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kangaroo.engine.requests import Acceptance
from kangaroo.serving.scheduler import Event

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass
class Usage:
    """Tokens of a request, all its choices together."""

    prompt: int
    completion: int = 0
    rounds: int = 0  # forwards of the target, the prompts' included
    cached: int = 0  # tokens of the prompt that were in a row; of several choices, the first's
    drafts: Acceptance = field(default_factory=Acceptance)

    def add(self, index: int, event: Event) -> None:
        """Count a step of a choice."""
        self.completion += len(event.tokens)
        self.drafts.add(event.accepted, event.drafted)
        self.rounds += bool(event.tokens)
        self.cached += 0 if index else event.reused

    def as_json(self) -> dict[str, Any]:
        """OpenAI's `usage`, and by vLLM's names what became of drafts."""
        usage = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.drafts.accepted,
                "rejected_prediction_tokens": self.drafts.drafted - self.drafts.accepted,
            },
            "rounds": self.rounds,
        }
        return {"usage": usage, "metrics": {"speculative_decoding": self.drafts.as_json()}}


class Metrics:
    """Counts of one server, in a registry that is not the process's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        here: dict[str, Any] = {"registry": self.registry}
        # by vLLM's names, which `vllm bench serve` reads
        spec = "vllm:spec_decode_num_"
        self.drafts = Counter(f"{spec}drafts", "Rounds that had a draft.", **here)
        self.drafted = Counter(f"{spec}draft_tokens", "Draft tokens.", **here)
        self.accepted = Counter(f"{spec}accepted_tokens", "Accepted draft tokens.", **here)
        self.accepted_at = Counter(
            f"{spec}accepted_tokens_per_pos", "The same by position.", ["position"], **here
        )
        timed = here | {"buckets": SECONDS}
        self.requests = Counter("kangaroo_requests", "Answers by status.", ["status"], **here)
        self.tokens = Counter("kangaroo_tokens", "Tokens, by kind.", ["kind"], **here)
        self.texts = Gauge("kangaroo_texts", "Texts, by state.", ["state"], **here)
        self.first = Histogram("kangaroo_first_token_seconds", "Until the first token.", **timed)
        self.step = Histogram("kangaroo_step_seconds", "Between two steps of a text.", **timed)

    def ended(self, usage: Usage) -> None:
        """A request has ended, one way or another."""
        for kind in ("prompt", "cached", "completion"):
            self.tokens.labels(kind).inc(getattr(usage, kind))
        self.drafts.inc(usage.drafts.rounds)
        self.drafted.inc(usage.drafts.drafted)
        self.accepted.inc(usage.drafts.accepted)
        for position, count in enumerate(usage.drafts.by_position):
            self.accepted_at.labels(str(position)).inc(count)

    def show(self, load: dict[str, int]) -> bytes:
        """All of it as text."""
        for state, texts in load.items():
            self.texts.labels(state).set(texts)
        return generate_latest(self.registry)
