"""What an engine is asked, and what it answers, step by step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kangaroo.engine.sampling import Sampling
from kangaroo.utils.errors import PromptError
from kangaroo.utils.ranges import Ranged, TextSeed


@dataclass
class Request(Ranged):
    """One text to write.

    Args:
        max_new_tokens: exactly this many are written unless an EOS or a stop string comes first.
        seed: with the sampling settings it fixes the text.
        stop: the text ends with the token that completes one of these strings.
        ignore_eos: an EOS is a token like any other, so that texts to be timed are equally long.
        sampling: None is the batch's, whose rule of acceptance always holds.
        written: the first of the new tokens, from another batch, as which this one goes on.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    seed: TextSeed = 0
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    sampling: Sampling | None = None
    written: Sequence[int] = ()

    @property
    def text(self) -> Sequence[int]:
        """The tokens that enter: the prompt, and what is written."""
        return [*self.prompt, *self.written] if self.written else self.prompt

    def check_fits(self, limit: str, tokens: int) -> None:
        """Errors: `PromptError` where prompt and new tokens are more than a limit's `tokens`."""
        prompt, new = len(self.prompt), self.max_new_tokens
        if prompt + new <= tokens:
            return
        room = tokens - prompt
        fix = f"Shorten the prompt or ask for at most {room} new tokens."
        if room < 1:
            fix = f"Shorten the prompt by {1 - room} or more: one new token needs room."
        wanted = f"the prompt has {prompt} tokens and {new} new ones were asked for"
        raise PromptError(f"{wanted}, but {limit} {tokens}. {fix}")


@dataclass
class StepRecord:
    """One verification of one row, or the token of its prefill: what was written, how many of these
    tokens were drafted, of how many; the seconds of the whole step, of all rows; if asked for, a
    record for each token (`topk_logits.py`), and perhaps more."""

    tokens: list[int]
    accepted: int = 0
    drafted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0
    kept: np.ndarray | None = None

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.draft_seconds + self.verify_seconds + self.host_seconds


@dataclass
class Generation:
    """What became of a request: its first step is the prefill, whose time is `prefill_seconds`
    instead; `finish` is "eos", "length" or "stop", or empty while it is being written; and `reused`
    tokens of the prompt were in the cache already."""

    tokens: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    finish: str = ""
    prefill_seconds: float = 0.0
    reused: int = 0

    @property
    def seconds(self) -> float:
        """Of prefill and all steps."""
        return self.prefill_seconds + sum(step.seconds for step in self.steps)

    @property
    def teacher(self) -> np.ndarray | None:
        """A record for each token (`topk_logits.py`), where these were asked for."""
        steps = [s.kept[: len(s.tokens)] for s in self.steps if s.kept is not None]
        return np.concatenate(steps) if steps else None


@dataclass
class Token:
    """One streamed token; `drafted` tells whether a drafter proposed it."""

    id: int
    drafted: bool


@dataclass
class Stream:
    """Tokens of one request as steps write them; `generation` grows along."""

    generation: Generation
    tokens: Iterator[Token]

    def __iter__(self) -> Iterator[Token]:
        return self.tokens


@dataclass
class Acceptance:
    """What became of drafts: rounds that had one by how many of its tokens were accepted; draft
    tokens, all nodes of a tree; and of one round at most. Names are those that vLLM gives a
    request's statistics (`metrics.speculative_decoding`, vLLM's pull request 48915)."""

    histogram: Counter[int] = field(default_factory=Counter)
    drafted: int = 0
    longest: int = 0

    def add(self, accepted: int, drafted: int) -> None:
        """Count a round; one without a draft does not count."""
        if drafted:
            self.histogram[accepted] += 1
            self.drafted += drafted
            self.longest = max(self.longest, drafted)

    @property
    def rounds(self) -> int:
        """How many had a draft."""
        return self.histogram.total()

    @property
    def accepted(self) -> int:
        """Draft tokens that were."""
        return sum(count * rounds for count, rounds in self.histogram.items())

    @property
    def by_position(self) -> list[int]:
        """In how many rounds the first draft token was accepted, the second, and so on."""
        last = max(self.histogram, default=0)
        return [sum(n for k, n in self.histogram.items() if k > place) for place in range(last)]

    def as_json(self) -> dict[str, Any]:
        """Lengths count the target's own token of a round, too: 1 is the least."""
        return {
            "mean_acceptance_length": 1 + self.accepted / max(self.rounds, 1),
            "draft_acceptance_rate": self.accepted / max(self.drafted, 1),
            "acceptance_histogram": [self.histogram[n] for n in range(self.longest + 1)],
            "num_spec_steps": self.rounds,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": self.longest,
        }
