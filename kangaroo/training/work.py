"""What a run trains on, in which order, and what it holds out."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kangaroo.models.prompts import Sample
from kangaroo.training.batches import check_trainable, plan, wanted_of
from kangaroo.training.config import TrainerConfig
from kangaroo.utils.errors import ConfigError


@dataclass
class Work:
    """A pure function of samples and options.

    Args:
        kept, held_out: samples to train on, and those that are never trained on.
        tokens: how many of each kept sample are read.
        positions: how many of those are learnt.
        batches: the micro-batches of all epochs, as indices into `kept`.
    """

    kept: Sequence[Sample]
    held_out: Sequence[Sample]
    tokens: list[int]
    positions: list[int]
    batches: list[list[int]]

    @staticmethod
    def of(samples: Sequence[Sample], config: TrainerConfig) -> Work:
        """Errors: `DataError` for a sample without trainable tokens, `ConfigError` where nothing is
        left to train on."""
        check_trainable(samples, config.max_length)
        check_holdout(config.holdout, len(samples))
        kept, held_out = samples[: -config.holdout], samples[-config.holdout :]
        kept = first(kept, config.tokens, config.max_length)
        tokens = [min(len(sample["input_ids"]), config.max_length) for sample in kept]
        learns_kept = bool(config.kept)
        positions = [
            int(wanted_of(sample, config.max_length, learns_kept).sum()) for sample in kept
        ]
        same = (config.accumulate or 1) if config.remember else 0
        batches = [
            batch
            for epoch in range(config.epochs)
            for batch in plan(tokens, config.batch_tokens, config.seed, epoch, config.packing, same)
        ]
        return Work(kept, held_out, tokens, positions, batches)


def check_holdout(holdout: int, count: int) -> None:
    """Errors: `ConfigError` where nothing of so many samples is left to train on."""
    if holdout >= count:
        fix = f"Pass trainer.holdout={max(1, count // 10)}" if count > 1 else "Give it more data"
        raise ConfigError(
            f"trainer.holdout={holdout} leaves nothing to train on of {count} conversations. {fix}."
        )


def first(samples: Sequence[Sample], tokens: int | None, max_length: int) -> Sequence[Sample]:
    """The first samples that together hold so many of the assistant's tokens; None is all.

    Errors: `ConfigError` where all of them hold fewer.
    """
    if tokens is None:
        return samples
    known = list(itertools.accumulate(sum(s["loss_mask"][1:max_length]) for s in samples))
    if tokens > known[-1]:
        raise ConfigError(
            f"trainer.tokens={tokens} is more than the {known[-1]} tokens of the assistant that "
            "the data has beside what is held out. Lower it, or make more data."
        )
    return samples[: bisect.bisect_left(known, tokens) + 1]
