"""Two methods compared on the questions that both answered: differences with their own intervals.

Two methods differ less from each other than each does from question to question: a question that is
hard to draft is hard for both. So their intervals may overlap while the difference is plain. Here
questions are drawn in pairs.

Shapes: Q questions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.speedup import interval, ratio
from kangaroo.utils.tables import Row, number, span

# A method's part of a comparison, and the `by_question` of its summary.
Method = tuple[dict[str, Any], Sequence[dict[str, Any]]]


def pairs(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Each of the methods against each that comes after it.

    `speed_ratio` says how many times as fast `row` is as `column`: the ratio of their speedups over
    vanilla. In one run they share vanilla's seconds, which cancel: what is left is the ratio of
    their own. A job of a sweep has vanilla's seconds of its own time. `cr_difference` is the
    compression rate of `row` less that of `column`. Either is None where it does not apply.
    """
    return [pair(row, column) for row, column in itertools.combinations(methods, 2)]


def pair(row: Method, column: Method) -> dict[str, Any]:
    """One entry of `pairs`."""
    (one, a), (other, b) = row, column
    of_other = {question["question_id"]: question for question in b}
    shared = [(q, of_other[q["question_id"]]) for q in a if q["question_id"] in of_other]
    return {
        "row": one["name"],
        "column": other["name"],
        "questions": len(shared),
        **_estimate("speed_ratio", shared, "vanilla_paired_seconds", "paired_seconds"),
        **_estimate("cr_difference", shared, "emitted", "rounds"),
    }


def _speed_ratio(totals_4: np.ndarray) -> np.ndarray:
    return ratio(totals_4[..., :2]) / ratio(totals_4[..., 2:])


def _cr_difference(totals_4: np.ndarray) -> np.ndarray:
    return ratio(totals_4[..., :2]) - ratio(totals_4[..., 2:])


STATISTICS = {"speed_ratio": _speed_ratio, "cr_difference": _cr_difference}


def _estimate(
    name: str, shared: Sequence[tuple[dict[str, Any], dict[str, Any]]], over: str, under: str
) -> dict[str, Any]:
    """A statistic of two methods, each a total over another total, and its interval."""
    values = [(a[over], a[under], b[over], b[under]) for a, b in shared]
    known = bool(values) and all(None not in four and four[1] and four[3] for four in values)
    values_Q4 = np.array(values if known else [(1.0,) * 4])
    value, ends = STATISTICS[name](values_Q4.sum(0)), interval(values_Q4, STATISTICS[name])
    return {name: float(value) if known else None, f"{name}_ci95": ends if known else None}


def noise_floor(methods: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The method that is vanilla decoding once more: `AGAIN`, or a job of a sweep, which has a
    vanilla of its own. None where there is none, or one question, which cannot vary.
    """
    for method in methods:
        ends = method["overall"]["speedup_ci95"]
        if method["name"] in (AGAIN, "vanilla") and ends is not None and ends[0] != ends[1]:
            return method  # a run's own baseline has an interval without a width
    return None


def table(found: Sequence[dict[str, Any]], name: str, same: float) -> list[Row]:
    """Row over column, or row less column; the upper half says it all.

    Args:
        found: what `pairs` returns.
        name: "speed_ratio" or "cr_difference".
        same: its value where there is no difference.
    """
    rows = list(dict.fromkeys(one["row"] for one in found))
    columns = list(dict.fromkeys(one["column"] for one in found))
    cells = {(one["row"], one["column"]): one for one in found}
    return [
        {"": row}
        | {
            column: shown(cells[row, column][name], cells[row, column][f"{name}_ci95"], same)
            if (row, column) in cells
            else ""
            for column in columns
        }
        for row in rows
    ]


def shown(value: float | None, ends: Sequence[float] | None, same: float) -> str:
    """A value and its interval as a cell; a single question has none.

    Args:
        same: the value that says that there is no difference.
    """
    if value is None or ends is None or ends[0] == ends[1]:
        return number(value)
    told = f"{number(value)} ({span(ends, ' to ' if min(ends) < 0 else '-')})"
    return f"{told}, no difference shown" if ends[0] <= same <= ends[1] else told
