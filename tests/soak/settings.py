"""What a soak decodes: tiny random targets and requests, with vanilla's texts, all from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random
from typing import Any, TypeVar

import torch
from helpers import ARCHITECTURES, VOCABULARY, tiny_model

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Rule, Sampling
from kangaroo.models.target import TargetModel

T = TypeVar("T")

# Under the rejection rule the text is promised to be vanilla's in greedy decoding alone.
SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8),
    "greedy, rejection rule": Sampling(rule=Rule.rejection),
    "top-p": Sampling(temperature=1.2, top_p=0.8),
    "top-k": Sampling(temperature=1.5, top_k=5, top_p=0.95),
}
COMPILED = ", compiled"
FAMILIES = [f"{name}{how}" for name in ARCHITECTURES for how in (COMPILED, "")]
REQUESTS = 40
PROMPT, LIMIT = (1, 100), (1, 160)  # tokens of a prompt, and the most of its text
EOS_SHARE = 0.75  # of the settings; in the others every text ends at its limit


@dataclass(frozen=True)
class Setting:
    """Requests to one target, and what vanilla decoding writes for each of them, alone. Prompts may
    enter in chunks of these sizes without another text.
    """

    family: str
    sampling: str
    lm: TargetModel
    requests: Sequence[Request]
    texts: Sequence[list[int]]
    eos_ids: frozenset[int]
    prefill_chunks: Sequence[int]


class Draw(Random):
    """Options drawn at random; `chosen` keeps them by name, as JSON values."""

    def __init__(self, seed: str):
        super().__init__(seed)
        self.chosen: dict[str, Any] = {}

    def of(self, name: str, *values: T) -> T:
        self.chosen[name] = self.choice(values)
        return self.chosen[name]


Build = Callable[[Setting, Draw], Drafter]


@cache
def target(family: str, device: str, dtype: torch.dtype = torch.float32) -> TargetModel:
    name, compiled = family.removesuffix(COMPILED), family.endswith(COMPILED)
    architecture, fields = ARCHITECTURES[name]
    hf = tiny_model(architecture, **fields)
    for parameter in hf.parameters():  # RoPE's frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    lm = TargetModel(hf.requires_grad_(False).to(device))
    return lm.compile_for_decoding() if compiled else lm


@lru_cache(1)  # its drafters come one after the other
def setting_of(
    number: int, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Setting:
    """Every family with every sampling, in turn: prompts of random tokens. Usually one token of
    vanilla's texts is made the EOS, so that it ends these texts in the middle, and drafts as well.

    In half precision the promise is that of native code and of the kernels of a GPU alone, and of
    prompts that enter in the same chunks.
    """
    exact = dtype == torch.float32
    families = [name for name in FAMILIES if exact or name.endswith(COMPILED)]
    rng = Random(f"{seed}/tiny/{number}")
    family, sampling = families[number % len(families)], list(SAMPLINGS)[number % len(SAMPLINGS)]
    lm = target(family, device, dtype)
    requests = [
        Request(
            [rng.randrange(VOCABULARY) for _ in range(rng.randint(*PROMPT))],
            rng.randint(*LIMIT),
            rng.randrange(1 << 31),
        )
        for _ in range(REQUESTS)
    ]
    texts = alone(lm, requests, SAMPLINGS[sampling])
    chunks = (16, 1024) if exact else (1024,)
    if rng.random() >= EOS_SHARE:
        return Setting(family, sampling, lm, requests, texts, frozenset(), chunks)
    longest = max(texts, key=len)
    eos = max(longest, key=longest.index)  # the last one to occur
    texts = [text[: text.index(eos) + 1] if eos in text else text for text in texts]
    return Setting(family, sampling, lm, requests, texts, frozenset({eos}), chunks)


def alone(
    lm: TargetModel,
    requests: Sequence[Request],
    how: Sampling,
    eos_ids: frozenset[int] = frozenset(),
) -> list[list[int]]:
    """What vanilla decoding writes for each request, one after the other."""
    engine = Engine(lm, Vanilla())
    engine.eos_ids = eos_ids
    done = dict(engine.completions(requests, how, 1))
    return [done[index].tokens for index in range(len(requests))]
