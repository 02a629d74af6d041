"""Decode held-out prompts with adapters in training: what their teacher-forced results promise."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from kangaroo.data.filters import answers
from kangaroo.drafters.base import TrainedConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.metrics import compression_rate, ctar
from kangaroo.heads.adapter_files import kept_dtype
from kangaroo.heads.base import Trainable
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.training.recipe import Trainee
from kangaroo.training.results import STEPS, compression
from kangaroo.utils.discovery import classes
from kangaroo.utils.errors import ConfigError

DRAFTERS = classes("kangaroo.drafters", TrainedConfig)
_ROWS = 8  # prompts decoded at a time: bounds the cache, whose rows are as long as the longest


def prompts_of(
    samples: Sequence[Sample], count: int, longest: int, new_tokens: int
) -> list[list[int]]:
    """The first `count` samples up to their last answer, if these are at most `longest` tokens.
    Errors: `ConfigError` where there is none."""
    starts = [answers(sample["loss_mask"])[-1][0] for sample in samples]
    pairs = zip(samples, starts, strict=True)
    prompts = [sample["input_ids"][:start] for sample, start in pairs if 0 < start <= longest]
    if count and not prompts:
        raise ConfigError(
            f"none of the {len(samples)} held-out samples has a prompt of 1 to {longest} tokens to "
            f"decode {new_tokens} more from. Lower trainer.decode_tokens, or pass "
            "trainer.decode_prompts=0."
        )
    return prompts[:count]


def decode(
    lm: TargetModel, trained: Sequence[Trainee], prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, float]:
    """What every adapter, as it would be saved now, is worth when decoding at threshold 0: greedy,
    with `STEPS` draft tokens.

    Returns, under `decode/<name>/`: `compression_rate`, tokens a forward of the target with the
    bonus token counted (1 without a drafter), and `ctar1`, ... as of `kangaroo.evaluation.metrics`.
    """
    metrics: dict[str, float] = {}
    for trainee in trained:
        method = DRAFTERS[trainee.recipe.architecture.drafter]
        drafter = method.chain(STEPS).of(lm, *frozen(lm, trainee))
        engine = Engine(lm, drafter, always_drafts=True)
        done = engine.generate(prompts, new_tokens, Sampling(), batch_size=_ROWS)
        steps = [record for generation in done for record in generation.steps]
        reached = ctar([record.accepted for record in steps], STEPS)
        written = sum(len(record.tokens) for record in steps)
        rate = compression_rate(written, len(steps))
        metrics |= compression(f"decode/{trainee.name}", reached, rate)
    return metrics


def frozen(lm: TargetModel, trainee: Trainee) -> tuple[Trainable, list[DraftHead]]:
    """A copy of the adapter as it would be saved and loaded now, and the heads it drafts with."""
    dtype = kept_dtype(trainee.adapter, lm)
    adapter = copy.deepcopy(trainee.adapter).to(dtype).to(lm.dtype).eval().requires_grad_(False)
    return adapter, adapter.draft_heads(lm, trainee.vocabulary_K)
