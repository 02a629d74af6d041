"""What Prometheus reads of a server."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kangaroo.serving.answers import Usage
from kangaroo.serving.jobs import Load

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counts of one server, in a registry of its own."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter("kangaroo_requests", "Answers by status.", ["status"], registry=own)
        self.tokens = Counter("kangaroo_tokens", "Tokens, by kind.", ["kind"], registry=own)
        self.texts = Gauge("kangaroo_texts", "Texts, by state.", ["state"], registry=own)
        self.first = Histogram(
            "kangaroo_first_token_seconds", "Until the first token.", buckets=SECONDS, registry=own
        )
        self.step = Histogram(
            "kangaroo_step_seconds", "Between two steps of a text.", buckets=SECONDS, registry=own
        )

    def ended(self, usage: Usage) -> None:
        """A request has ended, one way or another."""
        for kind in ("prompt", "cached", "completion", "drafted", "accepted"):
            self.tokens.labels(kind).inc(getattr(usage, kind))

    def show(self, load: Load) -> bytes:
        """All of it as text."""
        for state in ("running", "entering", "waiting"):
            self.texts.labels(state).set(getattr(load, state))
        return generate_latest(self.registry)


class Watch:
    """Times a request's first token, and the steps after it."""

    def __init__(self, metrics: Metrics):
        self.metrics, self.last, self.begun = metrics, time.perf_counter(), False

    def step(self) -> None:
        """A step was told."""
        now = time.perf_counter()
        histogram = self.metrics.step if self.begun else self.metrics.first
        histogram.observe(now - self.last)
        self.last, self.begun = now, True
