"""Decode held-out prompts with adapters in training: what their teacher-forced results promise."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from kangaroo.data.filters import answers
from kangaroo.drafters.base import Drafter, TrainedConfig
from kangaroo.drafters.chain import Chain
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import StepRecord
from kangaroo.engine.sampling import Rule, Sampling
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
    """The first `count` samples up to their last answer, but for those that are too long.

    Args:
        longest: tokens of a prompt.

    Errors: `ConfigError` where there is none.
    """
    starts = [answers(sample["loss_mask"])[-1][0] for sample in samples]
    pairs = zip(samples, starts, strict=True)
    prompts = [sample["input_ids"][:start] for sample, start in pairs if 0 < start <= longest]
    if count and not prompts:
        raise ConfigError(
            f"none of the {len(samples)} held-out samples has a prompt of 1 to {longest} tokens to "
            f"decode {new_tokens} more from. Lower trainer.decode_tokens, or pass "
            "trainer.decode_prompts=0 to decode nothing."
        )
    return prompts[:count]


def decode(
    lm: TargetModel, trained: Sequence[Trainee], prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, float]:
    """What every adapter, as it would be saved now, is worth when decoding at threshold 0.

    Returns, under `decode/<name>/`: `compression_rate`, tokens a forward of the target with the
    bonus token counted (1 without a drafter), and `ctar1`, ... as of `kangaroo.evaluation.metrics`,
    greedy with `STEPS` draft tokens; `sampled_acceptance`, the share of draft tokens accepted at
    temperature 1 by the rejection rule, one a round, which is what `expected_acceptance` expects;
    not for drafters that do not tell what their tokens were drawn from, as Medusa's, nor where
    every text ended with its first token, before anything was drafted.
    """

    def rounds(drafter: Drafter, sampling: Sampling) -> list[StepRecord]:
        engine = Engine(lm, drafter, always_drafts=True)
        done = engine.generate(prompts, new_tokens, sampling, batch_size=_ROWS)
        return [record for generation in done for record in generation.steps]

    metrics: dict[str, float] = {}
    for trainee in trained:
        name = f"decode/{trainee.name}"
        adapter, heads = frozen(lm, trainee)
        method = DRAFTERS[trainee.recipe.architecture.drafter]
        drafter = method.chain(STEPS).of(lm, adapter, heads)
        greedy = rounds(drafter, Sampling())
        reached = ctar([record.accepted for record in greedy], STEPS)
        written = sum(len(record.tokens) for record in greedy)
        metrics |= compression(name, reached, compression_rate(written, len(greedy)))
        if isinstance(drafter, Chain):  # which says what its tokens were drawn from
            single = method.chain(1).of(lm, adapter, heads)
            sampled = rounds(single, Sampling(temperature=1.0, rule=Rule.rejection))
            if drafted := sum(record.drafted for record in sampled):
                share = sum(record.accepted for record in sampled) / drafted
                metrics[f"{name}/sampled_acceptance"] = share
    return metrics


def frozen(lm: TargetModel, trainee: Trainee) -> tuple[Trainable, list[DraftHead]]:
    """A copy of the adapter as it would be saved and loaded now, and the heads it drafts with."""
    dtype = kept_dtype(trainee.adapter, lm)
    adapter = copy.deepcopy(trainee.adapter).to(dtype).to(lm.dtype).eval().requires_grad_(False)
    return adapter, adapter.draft_heads(lm, trainee.vocabulary_K)
