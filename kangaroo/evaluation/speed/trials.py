"""What methods write in turn for the speed benchmark, past any EOS, and what is made of it.

The first step of a text, its prefill, is timed apart; what comes after it is decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.bench import BenchConfig, load_questions, spread
from kangaroo.evaluation.metrics import interval, speedup
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.utils.errors import ConfigError

Method = Callable[[list[int], int], Generation]  # takes a prompt and a number of new tokens
Texts = list[list[Generation]]  # of each prompt, each time it was given


def write_by_engine(engine: Engine, prompt: list[int], new_tokens: int) -> Generation:
    """Greedy decoding on our engine."""
    request = Request(prompt, new_tokens, ignore_eos=True)
    ((_, generation),) = engine.completions([request], Sampling(), batch_size=1)
    return generation


def seconds_a_token(text: Generation) -> float:
    """Of decoding."""
    steps = text.steps[1:]
    return sum(step.seconds for step in steps) / sum(len(step.tokens) for step in steps)


def take_turns(
    methods: Mapping[str, Method],
    prompts: Sequence[list[int]],
    new_tokens: int,
    repeats: int,
    title: str,
) -> dict[str, Texts]:
    """What each method writes for each prompt, all in turn; who goes first changes each time."""
    names = list(methods)
    texts: dict[str, Texts] = {name: [[] for _ in prompts] for name in names}
    bar = tqdm(total=len(names) * len(prompts) * repeats, unit="text", desc=title)
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            first = (repeat + index) % len(names)
            for name in names[first:] + names[:first]:
                texts[name][index].append(methods[name](prompt, new_tokens))
                bar.update()
    bar.close()
    return texts


def against_vanilla(vanilla: Texts, method: Texts) -> dict[str, Any]:
    """How many times as fast as vanilla it decodes: the ratio of totals of each prompt's mean time
    a token, with its interval; and how often it wrote vanilla's text.
    """
    pairs = list(zip(vanilla, method, strict=True))
    seconds_P2 = np.array(
        [[np.mean([seconds_a_token(text) for text in texts]) for texts in pair] for pair in pairs]
    )
    return {
        "speedup": speedup(seconds_P2),
        "speedup_ci95": interval(seconds_P2),
        "equal_texts": sum(a[0].tokens == b[0].tokens for a, b in pairs),
    }


def question_prompts(
    tokenizer: PreTrainedTokenizerBase, count: int, bench: BenchConfig, longest: int
) -> list[list[int]]:
    """First turns of a bench, evenly spread over its file and so over its tasks, of those that have
    at most `longest` tokens.

    Errors: `ConfigError` where there are none.
    """
    firsts = [question.turns[0] for question in load_questions(bench)]
    prompts = [prompt_ids(tokenizer, [Message(role="user", content=first)]) for first in firsts]
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if not fitting:
        raise ConfigError(
            f"no question of {bench.name} has at most {longest} tokens, which is what the model's "
            "context leaves; lower speed.max_new_tokens or pass another bench."
        )
    return spread(fitting, count)


def long_prompt(tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """The last `length` tokens of a question on the demo bench's long texts, again and again."""
    texts = sorted((question.turns[0] for question in load_questions(BenchConfig())), key=len)
    text = "\n\n".join([*texts[-20:], "Write a detailed summary of all of the above."])
    ids = prompt_ids(tokenizer, [Message(role="user", content=text)])
    return (ids * (length // len(ids) + 1))[-length:]
