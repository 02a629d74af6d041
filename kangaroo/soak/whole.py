"""A real target with the drafters that people use it with, on the questions of a bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.base import Drafter
from kangaroo.engine.requests import Request
from kangaroo.evaluation.bench import Question
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.models.target import LM
from kangaroo.soak.settings import SAMPLINGS, Build, Setting, alone, sampling_of
from kangaroo.utils.errors import ConfigError

REQUESTS = 8
# That of the engine alone, with which vanilla decodes too: prompts pass PyTorch's modules, and in
# bfloat16 other chunks round otherwise, which changes texts at near-ties.
CHUNKS = (1024,)
LONGEST, LIMIT = 400, (8, 96)  # tokens of a prompt, and the most of its text


class Whole:
    """Questions drawn from a bench, with every sampling in turn.

    Args:
        model: the target's name.
        drafters: built for it once.

    Errors: `ConfigError` for a bench without a short question.
    """

    name = "model"

    def __init__(
        self,
        model: str,
        lm: LM,
        tokenizer: PreTrainedTokenizerBase,
        drafters: Mapping[str, Drafter],
        questions: Sequence[Question],
        seed: int,
    ):
        self.model, self.lm, self.seed = model, lm, seed
        self.drafters = {name: always(drafter) for name, drafter in drafters.items()}
        asked = [[Message(role="user", content=question.turns[0])] for question in questions]
        prompts = [prompt_ids(tokenizer, messages) for messages in asked]
        longest = min(LONGEST, lm.context - LIMIT[1])
        self.prompts = [prompt for prompt in prompts if len(prompt) <= longest]
        if not self.prompts:
            raise ConfigError(f"no question of the bench has at most {longest} tokens.")

    def setting(self, number: int) -> Setting:
        """Questions drawn at random, some of them cut off before the end of their text."""
        rng = Random(f"{self.seed}/{self.name}/{number}")
        requests = [
            Request(rng.choice(self.prompts), rng.randint(*LIMIT), rng.randrange(1 << 31))
            for _ in range(REQUESTS)
        ]
        sampling, eos_ids = sampling_of(number), frozenset(self.lm.eos_ids())
        texts = alone(self.lm, requests, SAMPLINGS[sampling], eos_ids)
        return Setting(self.model, sampling, self.lm, requests, texts, eos_ids, CHUNKS)


def always(built: Drafter) -> Build:
    """The same drafter in every setting."""
    return lambda setting, draw: built
