"""transformers' `generate`, timed as our engine is, and what records keep of a text."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from kangaroo.engine.clock import running
from kangaroo.engine.requests import Generation, StepRecord
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.records import MethodRun
from kangaroo.models.attention import ATTENTION
from kangaroo.models.prompts import Tokenizer, plain_text
from kangaroo.models.supported import usual_attention
from kangaroo.models.target import TargetModel


@contextmanager
def transformers_attention(lm: TargetModel) -> Iterator[None]:
    """Give the model its usual attention back, since `generate` brings its own cache."""
    lm.hf.set_attn_implementation(usual_attention(lm.hf))
    try:
        yield
    finally:
        lm.hf.set_attn_implementation(ATTENTION)


def generate(
    lm: TargetModel,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    eos_ids: Collection[int] = (),
    **speculation: Any,
) -> Generation:
    """transformers' `generate` with its own cache and attention, and its own way to speculate. Its
    rounds tell their whole time as that of the host, and no drafts."""
    sampling, marks = sampling or Sampling(), list[tuple[float, int]]()
    # told of the prompt and of each round's tokens: when, and how many
    watch = SimpleNamespace(put=lambda x: marks.append((running(), x.numel())), end=lambda: None)
    settings: dict[str, Any] = {  # what is unset, it takes from the model's own generation config
        "max_new_tokens": max_new_tokens,
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
    tokens_1T = torch.tensor([prompt], device=lm.device)
    with transformers_attention(lm), torch.random.fork_rng():
        torch.manual_seed(seed)
        settings |= {"attention_mask": torch.ones_like(tokens_1T), "streamer": watch} | speculation
        start = running()
        written_1T = lm.hf.generate(tokens_1T, **settings)
    tokens, steps, at = written_1T[0, len(prompt) :].tolist(), [], 0
    (first, _), *_ = rounds = marks[1:]
    before = first
    for mark, count in rounds:
        record = StepRecord(tokens[at : at + count], 0, 0, 0.0, 0.0, host_seconds=mark - before)
        steps.append(record)
        before, at = mark, at + count
    finish = "eos" if tokens[-1] in eos_ids else "length"
    return Generation(tokens, steps, finish, prefill_seconds=first - start)


def as_run(tokenizer: Tokenizer, generation: Generation, seconds: float) -> MethodRun:
    """A text and its times as records keep them: to the microsecond, so that they stay small."""
    text, steps = plain_text(tokenizer, generation.tokens).strip(), generation.steps
    return MethodRun(
        tokens=generation.tokens,
        text=text,  # stripped as Spec-Bench does
        finish=generation.finish,
        retokenised=len(tokenizer(text).input_ids),
        seconds=seconds,
        emitted=[len(step.tokens) for step in steps],
        accepted=[step.accepted for step in steps],
        drafted=[step.drafted for step in steps],
        draft_seconds=[round(step.draft_seconds, 6) for step in steps],
        verify_seconds=[round(step.verify_seconds, 6) for step in steps],
        host_seconds=[round(step.host_seconds, 6) for step in steps],
    )
