"""What a dataset is like: the numbers that its provenance gives."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kangaroo.data.filters import NGRAM, answers
from kangaroo.engine import topk_logits
from kangaroo.models.prompts import Sample

log = logging.getLogger(__name__)


def statistics(samples: Sequence[Sample]) -> dict[str, Any]:
    """Turns, lengths in tokens, and variety of what the assistant wrote, as JSON values.

    `prompt_tokens` are those between one answer and the next: template and user turn.
    `distinct_4grams` is the number of different 4-grams of tokens in answers, divided by all.
    """
    turns: Counter[int] = Counter()
    prompts, lengths, grams = [], [], Counter[tuple[int, ...]]()
    distinct: set[int] = set()
    for sample in samples:
        ids, spans = sample["input_ids"], answers(sample["loss_mask"])
        turns[len(spans)] += 1
        before = 0
        for start, stop in spans:
            prompts.append(start - before)
            lengths.append(stop - start)
            distinct.update(ids[start:stop])
            grams.update(tuple(ids[i : i + NGRAM]) for i in range(start, stop - NGRAM + 1))
            before = stop
    return {
        "turns": {str(count): turns[count] for count in sorted(turns)},
        "prompt_tokens": _distribution(prompts),
        "answer_tokens": _distribution(lengths),
        "distinct_tokens": len(distinct),
        "distinct_4grams": round(len(grams) / max(grams.total(), 1), 4),
    }


def stored_logits(samples: Sequence[Sample], model: str | None) -> dict[str, Any] | None:
    """What is kept of a model's distributions, as JSON values; None if nothing is."""
    stored = [sample["teacher"] for sample in samples if "teacher" in sample]
    if not stored:
        return None
    complete = sum(int(topk_logits.known(records).sum()) for records in stored)
    tokens, record = sum(map(len, stored)), stored[0].dtype
    likeliest = stored[0].dtype["tokens"].shape[0]
    chances = sum(float(records["chances"].sum(dtype=np.float64)) for records in stored)
    mass = chances / max(complete, 1)
    log.info(
        "of %d of %d answer tokens the %d likeliest are kept, with %.2f%% of the probability: %d "
        "bytes a token",
        *(complete, tokens, likeliest, 100 * mass, record.itemsize),
    )
    return {
        "model": model,
        "likeliest": likeliest,
        "known": round(complete / tokens, 6),
        "mass": round(mass, 6),
        "bytes_per_token": record.itemsize,
    }


def _distribution(lengths: Sequence[int]) -> dict[str, float]:
    p50, p95 = np.percentile(lengths, [50, 95])
    return {
        "mean": round(float(np.mean(lengths)), 1),
        "p50": float(p50),
        "p95": float(p95),
        "max": float(max(lengths)),
    }
