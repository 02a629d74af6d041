"""Texts written for the benchmark, and how long each took: by transformers and by our engine.

The first round of a text, which is the prefill, is timed apart; what comes after it is decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from kangaroo.engine.clock import running
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.evaluation.methods import generate_settings, transformers_attention
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass
class Trial:
    """One text by one method.

    Args:
        first_seconds: from the call to the end of the first round, so prefill is in it.
        decode_seconds: of all later rounds.
        rounds: (tokens written, tokens drafted) of each later round.
        draft_seconds, verify_seconds: parts of `decode_seconds`; 0 where they cannot be told apart.
    """

    prompt_tokens: int
    tokens: list[int]
    first_seconds: float
    decode_seconds: float
    rounds: list[tuple[int, int]]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def decoded(self) -> int:
        """Tokens written after the first round."""
        return sum(written for written, _ in self.rounds)

    @property
    def drafted(self) -> int:
        """Tokens drafted after the first round."""
        return sum(drafted for _, drafted in self.rounds)

    def lengths(self) -> list[int]:
        """Committed tokens before each later round."""
        first = self.prompt_tokens + len(self.tokens) - self.decoded
        return list(accumulate((written for written, _ in self.rounds[:-1]), initial=first))


Method = Callable[[list[int], int], Trial]


class Stopwatch(BaseStreamer):
    """Notes when `generate` hands over the prompt and the tokens of each round, and how many."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.marks.append(running())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


def timed_generate(lm: TargetModel, **speculation: Any) -> Method:
    """Greedy `generate` with transformers' own cache and attention, and its way to speculate."""

    def write(prompt: list[int], new_tokens: int) -> Trial:
        tokens_1T, watch = torch.tensor([prompt], device=lm.device), Stopwatch()
        settings = generate_settings(Sampling(), ()) | speculation
        settings |= {"attention_mask": torch.ones_like(tokens_1T), "streamer": watch}
        with transformers_attention(lm):
            start = running()
            written_1T = lm.hf.generate(tokens_1T, max_new_tokens=new_tokens, **settings)
        first, last = watch.marks[1], watch.marks[-1]
        rounds = [(count, 0) for count in watch.counts[2:]]
        text = written_1T[0, len(prompt) :].tolist()
        return Trial(len(prompt), text, first - start, last - first, rounds)

    return write


def timed_engine(engine: Engine) -> Method:
    """Greedy decoding on our engine, past any EOS."""

    def write(prompt: list[int], new_tokens: int) -> Trial:
        start = running()
        stream = engine.stream(prompt, new_tokens, ignore_eos=True)
        tokens = iter(stream)
        next(tokens)  # the first round has ended
        first = running()
        for _ in tokens:
            pass
        last = running()
        steps = stream.generation.steps[1:]
        rounds = [(len(step.tokens), step.drafted) for step in steps]
        draft = sum(step.draft_seconds for step in steps)
        verify = sum(step.verify_seconds for step in steps)
        text = stream.generation.tokens
        return Trial(len(prompt), text, first - start, last - first, rounds, draft, verify)

    return write


def take_turns(
    methods: Mapping[str, Method],
    prompts: Sequence[list[int]],
    new_tokens: int,
    repeats: int,
    title: str,
) -> dict[str, list[list[Trial]]]:
    """By method the trials of each prompt, all taken in turn; who goes first changes each time."""
    names = list(methods)
    trials: dict[str, list[list[Trial]]] = {name: [[] for _ in prompts] for name in names}
    bar = tqdm(total=len(names) * len(prompts) * repeats, unit="text", desc=title)
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            first = (repeat + index) % len(names)
            for name in names[first:] + names[:first]:
                trials[name][index].append(methods[name](prompt, new_tokens))
                bar.update()
    bar.close()
    return trials


def question_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, bench: BenchConfig, longest: int
) -> list[list[int]]:
    """First turns of a bench, evenly spread over its file and so over its tasks; those of more than
    `longest` tokens are left out, with a warning.

    Errors: `ConfigError` where none is left.
    """
    firsts = [question.turns[0] for question in load_questions(bench)]
    prompts = [prompt_ids(tokenizer, [Message(role="user", content=first)]) for first in firsts]
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if left_out := len(prompts) - len(fitting):
        log.warning("%d questions are left out: they have over %d tokens", left_out, longest)
    if not fitting:
        raise ConfigError(
            f"no question of {bench.name} has at most {longest} tokens, which is what the model's "
            "context leaves; lower speed.max_new_tokens or pass another bench."
        )
    count = min(count, len(fitting))
    return [fitting[(2 * i + 1) * len(fitting) // (2 * count)] for i in range(count)]


def long_prompt(tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """The last `length` tokens of a question on the demo bench's long texts, again and again."""
    texts = sorted((question.turns[0] for question in load_questions(BenchConfig())), key=len)
    text = "\n\n".join([*texts[-20:], "Write a detailed summary of all of the above."])
    ids = prompt_ids(tokenizer, [Message(role="user", content=text)])
    return (ids * (length // len(ids) + 1))[-length:]
