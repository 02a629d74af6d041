"""The values of a study: ratios of totals over questions, with intervals.

Shapes: Q questions, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kangaroo.evaluation.metrics import runs
from kangaroo.evaluation.records import METHOD, Record, Run
from kangaroo.evaluation.speedup import RESAMPLES, has, interval, paired_seconds, speedup
from kangaroo.utils.errors import ConfigError


@dataclass(frozen=True)
class Value:
    """A ratio; `low` and `high` are the ends of its 95% interval, None for a single question."""

    value: float
    low: float | None = None
    high: float | None = None


def over_runs(of: Callable[[Run], tuple[float, float]], record: Record) -> tuple[float, float]:
    """The sums over a question's turns of what `of` counts in each."""
    both = np.array([of(run) for run in runs([record], METHOD)], float)
    over, under = both.sum(0)
    return over, under


def _accepted(w: int, run: Run) -> tuple[float, float]:
    return sum(count >= w for count in run.accepted), len(run.accepted)


COUNTED: dict[str, Callable[[Record], tuple[float, float]]] = {
    "speedup": paired_seconds,
    "compression_rate": partial(over_runs, lambda run: (sum(run.emitted), len(run.emitted))),
    "acceptance_rate": partial(over_runs, lambda run: (sum(run.accepted), sum(run.drafted))),
}
CTAR = "ctar"


def pairs(records: Sequence[Record], metric: str) -> np.ndarray:
    """What a metric divides, `[Q, 2]`, a row a question: the metric is the ratio of the totals.

    Args:
        metric: as in `StudyConfig.metrics`; each is defined as that of `evaluation/metrics.py`.

    Errors: `ConfigError` for a metric that is not known, and for a speedup without vanilla.
    """
    of, position = COUNTED.get(metric), metric.removeprefix(CTAR)
    if metric.startswith(CTAR) and position.isdecimal():
        of = partial(over_runs, partial(_accepted, int(position)))
    if of is None:
        known = ", ".join([*COUNTED, "ctar1", "ctar2"])
        raise ConfigError(f"study.metrics: there is no '{metric}'; there are {known}, ...")
    if metric == "speedup" and not all(has(record, "vanilla") for record in records):
        raise ConfigError("a study of speedups needs vanilla decoding: add it to baselines=.")
    return np.array([of(record) for record in records], float)


def value(pairs_Q2: np.ndarray) -> Value | None:
    """The ratio of totals with its interval; None where there is nothing to divide by."""
    if not pairs_Q2[:, 1].sum():
        return None
    ends = interval(pairs_Q2) or (None, None)
    return Value(speedup(pairs_Q2), *ends)


def difference(more_Q2: np.ndarray, less_Q2: np.ndarray) -> Value:
    """A ratio less another of the same questions, which both are resampled together: what makes a
    question hard for both does not widen the interval.
    """
    middle = speedup(more_Q2) - speedup(less_Q2)
    if len(more_Q2) < 2:
        return Value(middle)
    rng = np.random.default_rng(0)
    picked_RQ = rng.integers(len(more_Q2), size=(RESAMPLES, len(more_Q2)))
    (a_R, b_R), (c_R, d_R) = more_Q2[picked_RQ].sum(1).T, less_Q2[picked_RQ].sum(1).T
    low, high = np.percentile(a_R / b_R - c_R / d_R, [2.5, 97.5]).tolist()
    return Value(middle, low, high)
