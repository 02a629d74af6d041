"""What a soak decodes: a target, a sampling and requests, with vanilla's texts, all from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol, TypeVar

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.models.target import LM

T = TypeVar("T")

# Under the rejection rule the text is promised to be vanilla's in greedy decoding alone.
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "greedy, rejection rule": Sampling(rule=Rule.rejection),
    "top-p": Sampling(temperature=1.2, top_p=0.8),
    "top-k": Sampling(temperature=1.5, top_k=5, top_p=0.95),
}


@dataclass(frozen=True)
class Setting:
    """Requests to one target, and what vanilla decoding writes for each of them.

    Args:
        family: what results call the target.
        sampling: a name of `SAMPLINGS`.
        texts: of each request, without the prompt, decoded alone.
        eos_ids: tokens that end a text.
        prefill_chunks: sizes in which prompts may enter the cache without another text.
    """

    family: str
    sampling: str
    lm: LM
    requests: Sequence[Request]
    texts: Sequence[list[int]]
    eos_ids: frozenset[int]
    prefill_chunks: Sequence[int]


class Draw:
    """Options drawn at random; `chosen` keeps them by name, as JSON values."""

    def __init__(self, rng: Random):
        self.rng = rng
        self.chosen: dict[str, Any] = {}

    def of(self, name: str, *values: T) -> T:
        """One of these values."""
        value = self.rng.choice(values)
        self.chosen[name] = value
        return value


Build = Callable[[Setting, Draw], Drafter]


class Part(Protocol):
    """Targets of one kind, with the drafters that can draft for them."""

    @property
    def name(self) -> str:
        """With a setting's number and a drafter it names a cell."""

    @property
    def drafters(self) -> Mapping[str, Build]:
        """By name, each built for a setting."""

    def setting(self, number: int) -> Setting:
        """The setting of that number, counted from 0; there is no last one."""


def sampling_of(number: int) -> str:
    """Settings take the samplings in turn."""
    return list(SAMPLINGS)[number % len(SAMPLINGS)]


def alone(lm: LM, requests: Sequence[Request], how: Sampling, eos: frozenset[int]) -> list[Any]:
    """What vanilla decoding writes for each request, one after the other."""
    engine = Engine(lm, Vanilla())
    engine.eos_ids = eos
    done = dict(engine.completions(requests, how, 1))
    return [done[index].tokens for index in range(len(requests))]
