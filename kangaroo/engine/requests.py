"""What an engine is asked, and what it answers, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kangaroo.engine.sampling import Sampling
from kangaroo.utils.errors import PromptError
from kangaroo.utils.ranges import Ranged, TextSeed


@dataclass
class Request(Ranged):
    """One text to write.

    Args:
        prompt: token ids.
        max_new_tokens: exactly this many are written unless an EOS or a stop string comes first.
        seed: with the sampling settings it fixes the text.
        stop: the text ends with the token that completes one of these strings.
        ignore_eos: an EOS is a token like any other, so that texts to be timed are equally long.
        sampling: this text's own; None is the batch's. The rule of acceptance is always that.
        written: the first of the new tokens, which another batch has written: they enter with the
            prompt, and the text goes on from them as it would have there.

    Errors: `ConfigError` for a seed that is no signed number of 64 bits.
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
        """The tokens that enter: the prompt, and what was written."""
        return [*self.prompt, *self.written] if self.written else self.prompt

    def check_fits(self, limit: str, tokens: int) -> None:
        """Errors: `PromptError` where prompt and new tokens are more than `tokens`, which is what
        `limit` says.
        """
        prompt, new = len(self.prompt), self.max_new_tokens
        if prompt + new <= tokens:
            return
        room = tokens - prompt
        fix = f"Shorten the prompt or ask for at most {room} new tokens."
        if room < 1:
            fix = f"Shorten the prompt by {1 - room} or more: one new token needs room."
        raise PromptError(
            f"the prompt has {prompt} tokens and {new} new ones were asked for, but {limit} "
            f"{tokens}. {fix}"
        )


@dataclass
class StepRecord:
    """One verification of one row, or what its prefill wrote: a token that nobody drafted.

    Args:
        tokens: what it wrote.
        accepted: how many of them were draft tokens.
        drafted: how many were proposed.
        draft_seconds, verify_seconds, host_seconds: time of the whole step (all rows), split.
        kept: a record for each token (`topk_logits.py`), and perhaps more, if asked for.
    """

    tokens: list[int]
    accepted: int
    drafted: int
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    kept: np.ndarray | None = None

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.draft_seconds + self.verify_seconds + self.host_seconds


@dataclass
class Generation:
    """What became of a request.

    Args:
        steps: the first is the prefill, whose time is not in the record.
        finish: "eos", "length" or "stop"; empty while it is being written.
        prefill_seconds: time until the prompt was in the cache and the first token was known.
        reused: tokens of the prompt that were in the cache already (`Engine.known`).
    """

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
