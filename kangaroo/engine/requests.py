"""Requests to an engine, and its answers, step by step."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kangaroo.engine.constraint import Constraint
from kangaroo.engine.sampling import Sampling
from kangaroo.utils.errors import PromptError
from kangaroo.utils.ranges import Ranged, TextSeed


@dataclass
class Request(Ranged):
    """One text to write.

    Args:
        max_new_tokens: exactly this many are written unless an EOS or a stop string comes first.
        seed: with the sampling settings it determines the text.
        stop: the text ends with the token that completes one of these strings.
        ignore_eos: an EOS does not end the text (timed texts have to be equally long).
        sampling: None is the batch's; the rule of acceptance is always the batch's.
        written: the first new tokens, if another batch has written them already.
        constraint: makes the restriction of the text, a new one each time that it is written.
        drafts: whether a drafter may help.
        keep: how many likeliest tokens of each distribution are kept (`Generation.teacher`).
    """

    prompt: Sequence[int]
    max_new_tokens: int
    seed: TextSeed = 0
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    sampling: Sampling | None = None
    written: Sequence[int] = ()
    constraint: Callable[[], Constraint] | None = None
    drafts: bool = True
    keep: int = 0

    @property
    def text(self) -> Sequence[int]:
        """The tokens to read: the prompt, and what is already written."""
        return [*self.prompt, *self.written] if self.written else self.prompt

    def check_fits(self, limit: str, tokens: int) -> None:
        """Errors: `PromptError` where prompt and new tokens exceed `tokens`, named by `limit`."""
        room = tokens - len(self.prompt)
        if self.max_new_tokens <= room:
            return
        fix = f"Shorten the prompt or ask for at most {room} new tokens."
        if room < 1:
            fix = f"Shorten the prompt by {1 - room} or more: one new token needs room."
        raise PromptError(
            f"the prompt has {len(self.prompt)} tokens and {self.max_new_tokens} new ones were "
            f"asked for, but {limit} {tokens}. {fix}"
        )


@dataclass
class StepRecord:
    """What a step, or the prefill, wrote in one row: `accepted` of its tokens were among the
    `drafted` ones (all nodes of a tree). Seconds are those of the whole step, for all rows; of one
    that is a single graph (`late_stepper.py`) all are `verify_seconds`. If they were asked for,
    `topk` has a record (`topk_logits.py`) of each token, and perhaps more."""

    tokens: list[int]
    accepted: int = 0
    drafted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0
    topk: np.ndarray | None = None

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.host_seconds


def compression_rate(steps: Sequence[StepRecord]) -> float:
    """Tokens for each forward of the target in these steps (arXiv 2404.18911, section 4.1)."""
    return sum(len(step.tokens) for step in steps) / len(steps)


@dataclass
class Generation:
    """The answer to a request. The first of `steps` is the prefill; `finish` is "eos", "length" or
    "stop", and empty until the text ends; `reused` tokens of the prompt were in the cache."""

    tokens: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    finish: str = ""
    prefill_seconds: float = 0.0
    reused: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of prefill and all steps."""
        return self.prefill_seconds + sum(step.seconds for step in self.steps)

    @property
    def teacher(self) -> np.ndarray | None:
        """A record of each token (`topk_logits.py`); None if they were not asked for."""
        steps = [s.topk[: len(s.tokens)] for s in self.steps if s.topk is not None]
        return np.concatenate(steps) if steps else None


@dataclass
class Token:
    """One streamed token, and whether a drafter proposed it."""

    id: int
    drafted: bool


@dataclass
class Stream:
    """The tokens of one request as steps write them; `generation` grows with them."""

    generation: Generation
    tokens: Iterator[Token]

    def __iter__(self) -> Iterator[Token]:
        return self.tokens


@dataclass
class Acceptance:
    """How many draft tokens were accepted: the number of rounds by accepted tokens (`histogram`),
    the number of draft tokens (all nodes of trees), and that of the longest draft. JSON keys are
    those of vLLM's request statistics (`metrics.speculative_decoding`, pull request 48915)."""

    histogram: Counter[int] = field(default_factory=Counter)
    drafted: int = 0
    longest: int = 0

    def add(self, accepted: int, drafted: int) -> None:
        if drafted:
            self.histogram[accepted] += 1
            self.drafted += drafted
            self.longest = max(self.longest, drafted)

    @property
    def rounds(self) -> int:
        """The number of rounds with a draft."""
        return self.histogram.total()

    @property
    def accepted(self) -> int:
        """The number of accepted draft tokens."""
        return sum(count * rounds for count, rounds in self.histogram.items())

    @property
    def by_position(self) -> list[int]:
        """In how many rounds the first draft token was accepted, the second, and so on."""
        most = max(self.histogram, default=0)
        return [sum(n for k, n in self.histogram.items() if k > i) for i in range(most)]

    def as_json(self) -> dict[str, Any]:
        """The statistics by vLLM's names; its mean length includes the target's own token."""
        return {
            "mean_acceptance_length": 1 + self.accepted / max(self.rounds, 1),
            "draft_acceptance_rate": self.accepted / max(self.drafted, 1),
            "acceptance_histogram": [self.histogram[n] for n in range(self.longest + 1)],
            "num_spec_steps": self.rounds,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": self.longest,
        }
