"""A finished run as a page of the documentation, with the results that it is made from beside it.

The page follows from the comparison alone. Nothing on it is typed by hand.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from kangaroo.evaluation import plots
from kangaroo.evaluation.comparison import compare, markdown, summaries_in
from kangaroo.evaluation.records import write_json
from kangaroo.utils.errors import DataError

INTRODUCTION = (
    "Made by `python evaluate.py results=OUTPUT page=FILE` from a finished run. The "
    "[comparison]({name}.json) has all metrics, and [one line for each question and "
    "method]({name}.csv) has its tokens, rounds and seconds. Every speedup is over vanilla "
    "decoding on the same engine, on the same questions, for the same number of tokens; intervals "
    "are at 95%, by a bootstrap over questions."
)


def write(results: Path, page: Path) -> None:
    """The comparison below a folder as a page, its plot in `img/`, and beside it, of its name, what
    it follows from: the comparison, and a line for each question and method.

    Errors: `DataError` for a folder without results; those of `compare`.
    """
    comparison, name = compare(results), page.stem
    if comparison is None:
        raise DataError(f"'{results}' holds no finished evaluation; pass the output= of one.")
    (page.parent / "img").mkdir(parents=True, exist_ok=True)
    plots.speedup_of_methods(comparison).savefig(page.parent / f"img/{name}_speedup.png", dpi=120)
    write_json(page.with_suffix(".json"), comparison)
    summaries = summaries_in(results)
    rows = [
        {"method": method["name"]} | {k: _to_microseconds(v) for k, v in question.items()}
        for method in comparison["methods"]
        for question in summaries[method["name"]]["by_question"]
    ]
    with page.with_suffix(".csv").open("w", encoding="utf-8", newline="") as stream:
        table = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    page.write_text(page_of(comparison, name), encoding="utf-8")


def page_of(comparison: dict[str, Any], name: str) -> str:
    """The page, as it follows from the comparison beside it.

    Args:
        name: of its file, and of those beside it.
    """
    return markdown(comparison, INTRODUCTION.format(name=name), f"img/{name}_")


def _to_microseconds(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
