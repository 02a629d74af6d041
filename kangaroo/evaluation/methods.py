"""transformers' `generate`, timed as our engine is, and answers as records keep them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from kangaroo.engine.clock import running
from kangaroo.engine.requests import Generation, StepRecord
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.records import MethodRun
from kangaroo.models.attention import ATTENTION
from kangaroo.models.packed import keep_widened
from kangaroo.models.prompts import Tokenizer, plain_text
from kangaroo.models.supported import usual_attention
from kangaroo.models.target import TargetModel


@contextmanager
def lent_to_transformers(lm: TargetModel) -> Iterator[None]:
    """Give the model its usual attention, since `generate` brings its own cache, and an empty
    generation config, since `generate` fills in from there what the caller's leaves open. Packed
    matrices are widened, and kept so: modules read them at every token."""
    own = lm.hf.generation_config
    keep_widened(lm.hf)
    lm.hf.set_attn_implementation(usual_attention(lm.hf))
    lm.hf.generation_config = GenerationConfig()
    try:
        yield
    finally:
        lm.hf.generation_config = own
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
    """transformers' `generate` with its own cache and attention; `speculation` are its options for
    speculative decoding. A round's whole time is its `host_seconds`, and no drafts are counted."""
    sampling = sampling or Sampling()
    marks = list[tuple[float, int]]()
    # a streamer, which is called with the prompt and then with each round's tokens
    streamer = SimpleNamespace(put=lambda x: marks.append((running(), x.numel())), end=lambda: None)
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": not sampling.greedy,
        "eos_token_id": list(eos_ids) or None,
        "pad_token_id": 0,
    }
    if not sampling.greedy:
        settings |= {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    config = GenerationConfig()
    others = config.update(**settings | speculation)  # what is no field of it
    tokens_1T = torch.tensor([prompt], device=lm.device)
    with lent_to_transformers(lm), torch.random.fork_rng():
        torch.manual_seed(seed)
        mask_1T = torch.ones_like(tokens_1T)
        start = running()
        written_1T = lm.hf.generate(
            tokens_1T, config, attention_mask=mask_1T, streamer=streamer, **others
        )
    tokens = written_1T[0, len(prompt) :].tolist()
    rounds = marks[1:]
    steps = []
    position = 0
    for (before, _), (time, count) in zip([rounds[0], *rounds], rounds, strict=False):
        steps.append(StepRecord(tokens[position : position + count], host_seconds=time - before))
        position += count
    finish = "eos" if tokens[-1] in eos_ids else "length"
    return Generation(tokens, steps, finish, prefill_seconds=rounds[0][0] - start)


def as_run(tokenizer: Tokenizer, generation: Generation, seconds: float) -> MethodRun:
    """An answer for the records, with times in whole microseconds, which keeps them small."""
    text = plain_text(tokenizer, generation.tokens).strip()
    steps = generation.steps
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
