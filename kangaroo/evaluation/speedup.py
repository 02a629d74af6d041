"""The speedup: the ratio of total seconds for the same number of tokens, and its interval.

Shapes: Q questions, R resamples, K values of a question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kangaroo.evaluation.records import METHOD, Record, Run

RESAMPLES = 2000


def has(record: Record, name: str) -> bool:
    """Whether that method answered the question."""
    return name in record.turns[0].runs


def round_seconds(run: Run) -> np.ndarray:
    """Of each round, its parts together."""
    return np.add(np.add(run.draft_seconds, run.verify_seconds), run.host_seconds)


def prefill_seconds(run: Run) -> float:
    """Time outside rounds: the cache's allocation, the prefill, the way into the engine and out."""
    return run.seconds - float(round_seconds(run).sum())


def seconds_until(run: Run, count: int) -> float:
    """Seconds until the first `count` tokens were there; a round they cut counts in proportion.

    hf tells no rounds: it is charged its mean time a token. Its prefill is spread over the whole
    text with that, so of a text that is cut it is charged too little, if anything.
    """
    if not run.emitted:
        return run.seconds * count / len(run.tokens)
    tokens = np.cumsum([0, *run.emitted])
    seconds = prefill_seconds(run) + np.cumsum([0.0, *round_seconds(run)])
    return float(np.interp(count, tokens, seconds))


def paired_seconds(
    record: Record, baseline: str = "vanilla", prefill: bool = True
) -> tuple[float, float]:
    """Seconds of a baseline and of the method for the same number of tokens, with the prefill or
    without.

    In each turn both get as many tokens as the shorter of the two texts has, so that a text which
    ended elsewhere (another EOS after a fork, hf's own noise under sampling) favours nobody.
    """
    theirs = method = 0.0
    for turn in record.turns:
        a, b = turn.runs[baseline], turn.runs[METHOD]
        count = min(len(a.tokens), len(b.tokens))
        theirs += seconds_until(a, count) - (0.0 if prefill else prefill_seconds(a))
        method += seconds_until(b, count) - (0.0 if prefill else prefill_seconds(b))
    return theirs, method


def against(
    baseline: str, statistic: Callable[[np.ndarray], Any], records: Sequence[Record]
) -> Any:
    """`speedup` or `interval` of the questions that a baseline answered; None where it did not."""
    pairs = [paired_seconds(record, baseline) for record in records if has(record, baseline)]
    return statistic(np.array(pairs)) if pairs else None


def speedup(pairs_Q2: np.ndarray) -> float:
    """The ratio of totals. Of each pair the first is the baseline's seconds."""
    return float(ratio(pairs_Q2.sum(0)))


def ratio(totals_2: np.ndarray) -> np.ndarray:
    """The first of the last axis over the second."""
    return totals_2[..., 0] / totals_2[..., 1]


def interval(
    values_QK: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = ratio
) -> list[float] | None:
    """95% interval of a statistic of totals over questions, such as `speedup`: percentile bootstrap
    over questions, the same every time. All values of a question are drawn together, so what
    methods have in common on it is in no interval of their difference. A single question, which
    cannot vary, has none.

    Args:
        statistic: of totals `[..., K]`.
    """
    if len(values_QK) < 2:
        return None
    rng = np.random.default_rng(0)
    picked_RQ = rng.integers(len(values_QK), size=(RESAMPLES, len(values_QK)))
    return np.percentile(statistic(values_QK[picked_RQ].sum(1)), [2.5, 97.5]).tolist()
