"""A finished run as a page of the documentation, with the results that it is made from beside it.

The page follows from two files that are small enough to be committed: the comparison, and one line
for each question and method. Nothing on it is typed by hand.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kangaroo.evaluation import comparison, comparison_plots, paired, report
from kangaroo.evaluation.metrics import Place, definitions
from kangaroo.evaluation.records import AGAIN, SUMMARY, write_json
from kangaroo.evaluation.summary import BASELINES
from kangaroo.utils import tables
from kangaroo.utils.errors import DataError
from kangaroo.utils.tables import Row, number

PLOTS = ("speedup", "speedup_by_task")
INTRODUCTION = (
    "Made by `scripts/result_page.py` from a finished run. The [comparison]({results}.json) has "
    "all metrics, and [one line for each question and method]({results}.csv) has its tokens, "
    "rounds and seconds. Every speedup is over vanilla decoding on the same engine, on the same "
    "questions, for the same number of tokens; intervals are at 95%, by a bootstrap over questions."
)


@dataclass(frozen=True)
class Results:
    """What a page is made from.

    Args:
        found: what `comparison.compare` returned.
        by_question: by method, what `summary.of_question` returned.
    """

    found: dict[str, Any]
    by_question: dict[str, list[dict[str, Any]]]

    @property
    def drafters(self) -> list[dict[str, Any]]:
        """All methods but the baselines, the fastest first."""
        return [m for m in self.found["methods"] if m["name"] not in BASELINES.values()]

    @property
    def tasks(self) -> list[str]:
        """The bench's, and "overall"."""
        return comparison_plots.tasks(self.found)


def gather(folder: Path) -> Results:
    """The results of a run of several methods.

    Errors: `DataError` for a folder without any; those of `comparison.compare`.
    """
    found = comparison.compare(folder)
    if found is None:
        raise DataError(f"'{folder}' holds no finished evaluation; pass the output= of one.")
    summaries = {
        method["name"]: json.loads((folder / method["name"] / SUMMARY).read_text("utf-8"))
        for method in found["methods"]
    }
    return Results(found, {name: told["by_question"] for name, told in summaries.items()})


def write(results: Results, page: Path) -> None:
    """The page, its plots in `img/` and its results in `results/` beside it, all of its name."""
    for folder in (page.parent / "img", page.parent / "results"):
        folder.mkdir(parents=True, exist_ok=True)
    for name in PLOTS:
        figure = comparison_plots.PLOTS[name](results.found)
        figure.savefig(page.parent / "img" / f"{page.stem}_{name}.png", dpi=120)
    kept = page.parent / "results" / page.stem
    write_json(kept.with_suffix(".json"), results.found)
    with kept.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        rows = [
            {"method": name} | {k: _short(v) for k, v in question.items()}
            for name, questions in results.by_question.items()
            for question in questions
        ]
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    page.write_text(markdown(read(page), page.stem), encoding="utf-8")


def _short(value: Any) -> Any:
    """Seconds to the microsecond."""
    return round(value, 6) if isinstance(value, float) else value


def read(page: Path) -> Results:
    """What `write` left beside a page."""
    kept = page.parent / "results" / page.stem
    by_question: dict[str, list[dict[str, Any]]] = {}
    with kept.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            values = {name: _value(text) for name, text in row.items() if name != "method"}
            by_question.setdefault(row["method"], []).append(values)
    return Results(json.loads(kept.with_suffix(".json").read_text("utf-8")), by_question)


def _value(text: str) -> Any:
    """A number, a word, or None for nothing."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def markdown(results: Results, name: str) -> str:
    """The page.

    Args:
        name: of the page's file, and of those beside it.
    """
    found = results.found
    parts = [
        "# {model} on {bench}: {questions} questions".format(**found),
        comparison.asked(found),
        INTRODUCTION.format(results=f"results/{name}"),
        "## Speedup over vanilla by task",
        tables.markdown(speedups(results)),
        f"![speedup by method](img/{name}_speedup.png)",
        f"![speedup by task](img/{name}_speedup_by_task.png)",
        *comparison.differences(found),
        *fastest_by_task(results),
        "## Compression rate by task",
        tables.markdown(by_task(results, "compression_rate")),
        "## Acceptance, speed and cost",
        tables.markdown(acceptance(results)),
        "## By Spec-Bench's own formula",
        tables.markdown(by_task(results, "spec_bench_speedup")),
        "## Lossless",
        *(lossless(method, found) for method in results.drafters),
        "## How to read this",
        report.listed([comparison.PAIRED, *definitions(Place.tasks), *comparison.COST[:-1]]),
        "## Provenance",
        report.listed(comparison.provenance_lines(found)),
    ]
    return "\n\n".join(parts) + "\n"


def groups(method: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A method's metrics by task, and overall."""
    return method["by_task"] | {"overall": method["overall"]}


def speedups(results: Results) -> list[Row]:
    """Each with its interval; so do the functions below without."""
    return [
        {"method": method["name"]}
        | {
            task: paired.shown(m["speedup"], m["speedup_ci95"], same=1.0)
            for task in results.tasks
            for m in (groups(method)[task],)
        }
        for method in results.drafters
    ]


def by_task(results: Results, metric: str) -> list[Row]:
    """One metric of each method."""
    return [
        {"method": method["name"]}
        | {task: number(groups(method)[task][metric]) for task in results.tasks}
        for method in results.drafters
    ]


def fastest_by_task(results: Results) -> list[str]:
    """The fastest over each of the other drafters, task by task; nothing where it is alone."""
    first, *others = [method for method in results.drafters if method["name"] != AGAIN]
    if not others:
        return []
    return [
        f"## Speed of {first['name']} over each of the others, by task",
        tables.markdown([_over(results, first, other) for other in others]),
    ]


def _over(results: Results, first: dict[str, Any], other: dict[str, Any]) -> Row:
    row = {"over": other["name"]}
    for task in results.tasks:
        one, two = (
            (method, _of_task(results.by_question[method["name"]], task))
            for method in (first, other)
        )
        difference = paired.pair(one, two)
        ends = difference["speed_ratio_ci95"]
        row[task] = paired.shown(difference["speed_ratio"], ends, same=1.0)
    return row


def _of_task(questions: Sequence[dict[str, Any]], task: str) -> list[dict[str, Any]]:
    return [question for question in questions if task in (question["task"], "overall")]


def acceptance(results: Results) -> list[Row]:
    """A row a method; the baselines have one too."""
    return [
        {"method": method["name"]}
        | {"CR": number(method["overall"]["compression_rate"])}
        | comparison.ctars(method["overall"])
        | {
            "accepted": tables.share(method["overall"]["acceptance_rate"]),
            "tokens/s": number(method["overall"]["tokens_per_second"], 1),
            "params": tables.short(method["drafter_cost"]["parameters"]),
            "memory": f"{tables.short(method['drafter_cost']['bytes'])}B",
        }
        for method in results.found["methods"]
    ]


def lossless(method: dict[str, Any], found: dict[str, Any]) -> str:
    """How many of a method's texts are vanilla's, in a sentence."""
    told = {"lossless": method["lossless"], "settings": found["settings"]}
    if method["lossless"]["identical"] is None:
        return f"{method['name']}: {report.verdict(told)}"
    forks = ", ".join(f"{label}: {n}" for label, n in method["lossless"]["forks"].items()) or "none"
    turns = "{identical} of {turns} turns".format(**method["lossless"])
    return f"{method['name']}: {turns} are vanilla's, token for token; forks: {forks}."
