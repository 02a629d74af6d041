"""Token counts of a request, and the server's metrics for Prometheus."""

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kangaroo.engine.requests import Acceptance
from kangaroo.serving.scheduler import Event

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass
class Usage:
    """Token counts of a request, over all its choices."""

    prompt: int
    completion: int = 0
    rounds: int = 0  # forward passes of the target, prefill included
    cached: int = 0  # tokens of prompts that were in the KV cache for their first choices
    drafts: Acceptance = field(default_factory=Acceptance)

    def add(self, index: int, event: Event) -> None:
        """Count a step of a prompt's choice `index`."""
        self.completion += len(event.step.tokens)
        self.drafts.add(event.step.accepted, event.step.drafted)
        self.rounds += bool(event.step.tokens)
        self.cached += 0 if index else event.reused

    def as_json(self) -> dict[str, Any]:
        """OpenAI's `usage`, and the acceptance of drafts by vLLM's names."""
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
    """The metrics of one server, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        spec = "vllm:spec_decode_num_"  # vLLM's names, which `vllm bench serve` reads
        self.drafts = Counter(f"{spec}drafts", "Rounds that had a draft.", **options)
        self.drafted = Counter(f"{spec}draft_tokens", "Draft tokens.", **options)
        self.accepted = Counter(f"{spec}accepted_tokens", "Accepted draft tokens.", **options)
        self.accepted_at = Counter(
            f"{spec}accepted_tokens_per_pos", "The same by position.", ["position"], **options
        )
        self.requests = Counter("kangaroo_requests", "Answers by status.", ["status"], **options)
        self.tokens = Counter("kangaroo_tokens", "Tokens, by kind.", ["kind"], **options)
        self.texts = Gauge("kangaroo_texts", "Texts, by state.", ["state"], **options)
        options["buckets"] = SECONDS
        self.first = Histogram("kangaroo_first_token_seconds", "Until the first token.", **options)
        self.step = Histogram("kangaroo_step_seconds", "Between two steps of a text.", **options)

    def count(self, usage: Usage) -> None:
        """Count a request that has ended."""
        for kind in ("prompt", "cached", "completion"):
            self.tokens.labels(kind).inc(getattr(usage, kind))
        self.drafts.inc(usage.drafts.rounds)
        self.drafted.inc(usage.drafts.drafted)
        self.accepted.inc(usage.drafts.accepted)
        for position, count in enumerate(usage.drafts.by_position):
            self.accepted_at.labels(str(position)).inc(count)

    def as_text(self, load: dict[str, int]) -> bytes:
        """All metrics in Prometheus' text format."""
        for state, texts in load.items():
            self.texts.labels(state).set(texts)
        return generate_latest(self.registry)
