"""Ratios of totals over questions, and their intervals.

Questions differ more than methods do: one that is hard to draft is hard for every drafter. So two
intervals may overlap while the difference is plain, and methods are compared on the same questions.

Shapes: Q questions, R resamples, K values of a question.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

RESAMPLES = 2000


def ratio(totals_K: np.ndarray) -> np.ndarray:
    """The first of the last axis over the second."""
    return totals_K[..., 0] / totals_K[..., 1]


def difference(totals_4: np.ndarray) -> np.ndarray:
    """A ratio less another one."""
    return ratio(totals_4[..., :2]) - ratio(totals_4[..., 2:])


def ratio_of_ratios(totals_4: np.ndarray) -> np.ndarray:
    """A ratio over another one."""
    return ratio(totals_4[..., :2]) / ratio(totals_4[..., 2:])


def speedup(pairs_Q2: np.ndarray) -> float:
    """The ratio of totals. Of each pair the first is the baseline's seconds."""
    return float(ratio(pairs_Q2.sum(0)))


def interval(
    values_QK: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = ratio
) -> list[float] | None:
    """95% interval of a statistic of totals over questions: percentile bootstrap over questions,
    the same every time. All values of a question are drawn together, so what methods have in
    common on it is in no interval of their difference. A single question has none.

    Args:
        statistic: of totals `[..., K]`.
    """
    if len(values_QK) < 2:
        return None
    rng = np.random.default_rng(0)
    picked_RQ = rng.integers(len(values_QK), size=(RESAMPLES, len(values_QK)))
    return np.percentile(statistic(values_QK[picked_RQ].sum(1)), [2.5, 97.5]).tolist()
