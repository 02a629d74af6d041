"""Texts written for the benchmark, and how long each took: by transformers and by our engine.

A *round* is one forward of the target: one token, or with Kangaroo a draft and its verification.
The first round of a text, which is the prefill, is timed apart; what comes after it is decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError

log = logging.getLogger(__name__)

TAIL = 48  # tokens at the end of a long prompt that stay: the question and the assistant's header


@dataclass
class Trial:
    """One text by one method.

    Args:
        first_seconds: from the call to the end of the first round, so prefill is in it.
        decode_seconds: of all later rounds.
        rounds: (tokens written, tokens drafted) of each later round.
        draft_seconds, verify_seconds: parts of `decode_seconds`; 0 where they cannot be told apart.
        prompt: index of the prompt.
        repeat: index of the repetition.
    """

    prompt_tokens: int
    tokens: list[int]
    first_seconds: float
    decode_seconds: float
    rounds: list[tuple[int, int]]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    method: str = ""
    prompt: int = 0
    repeat: int = 0

    @property
    def decoded(self) -> int:
        """Tokens written after the first round."""
        return sum(written for written, _ in self.rounds)

    @property
    def drafted(self) -> int:
        """Tokens drafted after the first round."""
        return sum(drafted for _, drafted in self.rounds)

    @property
    def seconds_per_token(self) -> float:
        """Of decoding, the first round left out."""
        return self.decode_seconds / self.decoded

    def lengths(self) -> list[int]:
        """Committed tokens before each later round."""
        lengths = [self.prompt_tokens + len(self.tokens) - self.decoded]
        for written, _ in self.rounds[:-1]:
            lengths.append(lengths[-1] + written)
        return lengths


Method = Callable[[list[int], int], Trial]


class Stopwatch(BaseStreamer):
    """Notes when `generate` hands over the prompt and the tokens of each round, and how many."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Tokens have come."""
        self.marks.append(running())
        self.counts.append(value.numel())

    def end(self) -> None:
        """Nothing is left to note."""


def timed_generate(lm: LM, **speculation: Any) -> Method:
    """Greedy `generate` with the cache and attention that transformers uses by itself.

    Args:
        speculation: what `generate` takes for a way of its own to speculate.
    """

    def write(prompt: list[int], new_tokens: int) -> Trial:
        tokens_1T = torch.tensor([prompt], device=lm.device)
        watch = Stopwatch()
        with transformers_attention(lm):
            start = running()
            written_1T = lm.hf.generate(
                tokens_1T,
                attention_mask=torch.ones_like(tokens_1T),
                max_new_tokens=new_tokens,
                streamer=watch,
                **generate_settings(Sampling(), ()),
                **speculation,
            )
        first, last = watch.marks[1], watch.marks[-1]
        return Trial(
            prompt_tokens=len(prompt),
            tokens=written_1T[0, len(prompt) :].tolist(),
            first_seconds=first - start,
            decode_seconds=last - first,
            rounds=[(count, 0) for count in watch.counts[2:]],
        )

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
        return Trial(
            prompt_tokens=len(prompt),
            tokens=stream.generation.tokens,
            first_seconds=first - start,
            decode_seconds=last - first,
            rounds=[(len(step.tokens), step.drafted) for step in steps],
            draft_seconds=sum(step.draft_seconds for step in steps),
            verify_seconds=sum(step.verify_seconds for step in steps),
        )

    return write


def take_turns(
    methods: dict[str, Method],
    prompts: Sequence[list[int]],
    new_tokens: int,
    repeats: int,
    title: str,
) -> list[Trial]:
    """Every method on every prompt, repeatedly; who goes first changes each time."""
    trials = []
    names = list(methods)
    bar = tqdm(total=len(names) * len(prompts) * repeats, unit="text", desc=title)
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            first = (repeat + index) % len(names)
            for name in names[first:] + names[:first]:
                trial = methods[name](prompt, new_tokens)
                trials.append(replace(trial, method=name, prompt=index, repeat=repeat))
                bar.update()
    bar.close()
    return trials


def question_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, bench: BenchConfig, longest: int
) -> tuple[list[list[int]], list[str]]:
    """First turns of a bench, the same number of every task or one less, and their tasks.

    Args:
        longest: tokens of a prompt; longer ones are left out, with a warning.

    Errors: `ConfigError` where none is left.
    """
    by_task: dict[str, list[list[int]]] = {}
    left_out = 0
    for question in load_questions(bench):
        prompt = prompt_ids(tokenizer, [Message(role="user", content=question.turns[0])])
        if len(prompt) <= longest:
            by_task.setdefault(question.task, []).append(prompt)
        left_out += len(prompt) > longest
    if left_out:
        log.warning("%d questions are left out: they have over %d tokens", left_out, longest)
    if not by_task:
        raise ConfigError(
            f"no question of {bench.name} has at most {longest} tokens, which is what the model's "
            "context leaves; lower speed.max_new_tokens or pass another bench."
        )
    prompts, tasks = [], []
    for i, (task, asked) in enumerate(by_task.items()):
        share = len(range(i, count, len(by_task)))
        for j in range(min(share, len(asked))):
            prompts.append(asked[(2 * j + 1) * len(asked) // (2 * share)])
            tasks.append(task)
    return prompts, tasks


def long_prompt(tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """A question on the demo bench's long texts, cut (or repeated) to exactly `length` tokens."""
    asked = [question.turns[0] for question in load_questions(BenchConfig())]
    longest = sorted(asked, key=len, reverse=True)[:20]
    ids: list[int] = []
    text = ""
    while len(ids) < length:
        text += "\n\n".join(longest) + "\n\n"
        question = f"{text}Write a detailed summary of all of the above."
        ids = prompt_ids(tokenizer, [Message(role="user", content=question)])
    tail = min(TAIL, length // 2)
    return ids[: length - tail] + ids[len(ids) - tail :]
