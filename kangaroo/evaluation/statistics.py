"""Ratios of totals over questions: intervals, methods in pairs, how many questions it takes.

Questions differ more than methods do: one that is hard to draft is hard for every drafter. So two
intervals may overlap while the difference is plain, and methods are compared on the same questions.

Shapes: Q questions, R resamples, K values of a question.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kangaroo.evaluation.records import AGAIN, SUMMARY

RESAMPLES = 2000
DEVIATIONS = 2 * 1.96  # standard deviations between the ends of a 95% interval
# Of the speedup, from question to question, as a share of it. SmolLM2-135M on Spec-Bench, 24
# questions: 0.11 with kangaroo, 0.33 with hybrid.
ASSUMED_SPREAD = 0.3
FEWEST = 8  # questions that tell a spread

Question = dict[str, Any]  # an entry of `by_question` in a summary


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


def compare_all(by_question: dict[str, list[Question]]) -> list[dict[str, Any]]:
    """Each of the methods, by name, against each that comes after it."""
    return [compare_pair(*pair) for pair in itertools.combinations(by_question.items(), 2)]


def compare_pair(
    row: tuple[str, Sequence[Question]], column: tuple[str, Sequence[Question]]
) -> dict[str, Any]:
    """Two methods on the questions that both answered.

    `speed_ratio` says how many times as fast `row` is as `column`: the ratio of their speedups over
    vanilla. In one run they share vanilla's seconds, which cancel. A job of a sweep has vanilla's
    seconds of its own time. `cr_difference` is the compression rate of `row` less that of
    `column`. Either is None where it does not apply.
    """
    of_column = {question["question_id"]: question for question in column[1]}
    shared = [(q, of_column[q["question_id"]]) for q in row[1] if q["question_id"] in of_column]
    result: dict[str, Any] = {"row": row[0], "column": column[0], "questions": len(shared)}
    for name, statistic, over, under in (
        ("speed_ratio", ratio_of_ratios, "vanilla_paired_seconds", "paired_seconds"),
        ("cr_difference", difference, "emitted", "rounds"),
    ):
        fours = [(a[over], a[under], b[over], b[under]) for a, b in shared]
        applies = bool(fours) and all(None not in x and x[1] and x[3] for x in fours)
        values_Q4 = np.array(fours if applies else [(1.0,) * 4])
        result[name] = float(statistic(values_Q4.sum(0))) if applies else None
        result[f"{name}_ci95"] = interval(values_Q4, statistic) if applies else None
    return result


def noise_floor(methods: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of a comparison's methods the one that is vanilla decoding once more: `AGAIN`, or a job of a
    sweep, which has a vanilla of its own. None where there is none, or one question.
    """
    for method in methods:
        ends = method["overall"]["speedup_ci95"]
        if method["name"] in (AGAIN, "vanilla") and ends is not None and ends[0] != ends[1]:
            return method  # a run's own baseline has an interval without a width
    return None


def spread_of(by_question: Sequence[Question]) -> float | None:
    """The standard deviation over questions of what each adds to the speedup, as a share of that
    (the delta method); None where too few questions tell it, or vanilla did not run.
    """
    pairs = [(q["vanilla_paired_seconds"], q["paired_seconds"]) for q in by_question]
    if len(pairs) < FEWEST or None in pairs[0]:
        return None
    pairs_Q2 = np.array(pairs, float)
    vanilla_Q, method_Q = pairs_Q2.T
    return float((vanilla_Q - speedup(pairs_Q2) * method_Q).std(ddof=1) / vanilla_Q.mean())


def earlier_spread(folder: str | None, model: str, drafter: str) -> tuple[float, str]:
    """The spread by the newest finished run of that model and drafter below a folder, else the
    assumed one; and where it is from, in words.
    """
    files = [] if folder is None else Path(folder).rglob(SUMMARY)
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        summary = json.loads(file.read_text(encoding="utf-8"))
        if (summary["model"], summary["drafter"]) == (model, drafter):
            spread = spread_of(summary.get("by_question", []))
            if spread is not None:
                return spread, f"by the spread of {spread:.2f} in {file.parent}"
    return ASSUMED_SPREAD, f"a spread of {ASSUMED_SPREAD} is assumed: no earlier run tells it"


def expected_width(spread: float, questions: int) -> float:
    """Of the speedup's 95% interval, from end to end, as a share of the speedup."""
    return DEVIATIONS * spread / math.sqrt(questions)


def questions_for(spread: float, width: float) -> int:
    """How many an interval of at most this width takes."""
    return max(1, math.ceil((DEVIATIONS * spread / width) ** 2))
