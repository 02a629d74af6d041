"""The decoders that are timed side by side: our engine with some drafter, and `generate`.

Each takes the prompt's ids, the most new tokens and a seed, and returns a `MethodRun`. Tokenising
is outside the time; prefill, and the allocation of the cache, are inside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from kangaroo.engine.clock import now
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import StepRecord
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.records import MethodRun
from kangaroo.models.attention import ATTENTION
from kangaroo.models.prompts import plain_text
from kangaroo.models.supported import usual_attention
from kangaroo.models.target import TargetModel

Decoder = Callable[[list[int], int, int], MethodRun]


def by_engine(engine: Engine, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> Decoder:
    """Our engine with its drafter."""

    def decode(prompt: list[int], max_new_tokens: int, seed: int) -> MethodRun:
        start = now(engine.lm.device)
        (generation,) = engine.generate([prompt], max_new_tokens, sampling, seeds=[seed])
        seconds = now(engine.lm.device) - start
        return as_run(tokenizer, generation.tokens, generation.finish, seconds, generation.steps)

    return decode


@contextmanager
def transformers_attention(lm: TargetModel) -> Iterator[None]:
    """Give the model its usual attention back, since `generate` brings its own cache."""
    lm.hf.set_attn_implementation(usual_attention(lm.hf))
    try:
        yield
    finally:
        lm.hf.set_attn_implementation(ATTENTION)


def by_transformers(
    lm: TargetModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> Decoder:
    """`generate` with transformers' own cache and attention. Under sampling its noise is its own,
    so that its time can be compared, its text can't.
    """
    eos_ids = lm.eos_ids()
    settings = generate_settings(sampling, eos_ids)

    def decode(prompt: list[int], max_new_tokens: int, seed: int) -> MethodRun:
        config = GenerationConfig(max_new_tokens=max_new_tokens, **settings)
        tokens_1T = torch.tensor([prompt], device=lm.device)
        with transformers_attention(lm), torch.random.fork_rng():
            torch.manual_seed(seed)
            start = now(lm.device)
            written_1T = lm.hf.generate(
                tokens_1T, attention_mask=torch.ones_like(tokens_1T), generation_config=config
            )
            seconds = now(lm.device) - start
        tokens = written_1T[0, len(prompt) :].tolist()
        return as_run(tokenizer, tokens, "eos" if tokens[-1] in eos_ids else "length", seconds, [])

    return decode


def generate_settings(sampling: Sampling, eos_ids: Collection[int]) -> dict[str, Any]:
    """What `generate` gets: what is unset, it would take from the model's own generation config."""
    return {
        "do_sample": not sampling.greedy,
        "temperature": 1.0 if sampling.greedy else sampling.temperature,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "top_k": 50 if sampling.greedy else sampling.top_k,
        "repetition_penalty": 1.0,
        "num_beams": 1,
        "eos_token_id": list(eos_ids) or None,
        "pad_token_id": 0,
        "use_cache": True,
    }


def as_run(
    tokenizer: PreTrainedTokenizerBase,
    tokens: list[int],
    finish: str,
    seconds: float,
    steps: list[StepRecord],
) -> MethodRun:
    """A text and its times as records keep them: to the microsecond, so that they stay small."""
    text = plain_text(tokenizer, tokens).strip()  # as Spec-Bench does
    return MethodRun(
        tokens=tokens,
        text=text,
        finish=finish,
        retokenised=len(tokenizer(text).input_ids),
        seconds=seconds,
        emitted=[len(step.tokens) for step in steps],
        accepted=[step.accepted for step in steps],
        drafted=[step.drafted for step in steps],
        draft_seconds=[round(step.draft_seconds, 6) for step in steps],
        verify_seconds=[round(step.verify_seconds, 6) for step in steps],
        host_seconds=[round(step.host_seconds, 6) for step in steps],
    )
