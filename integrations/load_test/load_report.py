"""The report of a load test: a table, sentences and curves, by the number of users."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kangaroo.evaluation.plots import FAINT, HF, METHOD, OTHER, VANILLA
from kangaroo.utils import tables
from kangaroo.utils.provenance import describe_machine
from kangaroo.utils.tables import number

BASELINE = "vanilla"
# The metrics of a cell, each with its heading and the factor of its unit.
METRICS = {
    "tokens_per_second": ("tokens/s", 1),
    "first_token": ("first token, ms", 1000),
    "between_tokens": ("between tokens, ms", 1000),
    "total": ("total, s", 1),
}
COLORS = (VANILLA, METHOD, OTHER, "#5a9367", HF, "#8e5ea2", "#333333")  # of methods
NOTES = (
    "Means over the requests of a cell, as guidellm measures them, and of these the median of the "
    "rounds; *x* is the median ratio to vanilla in the same round, and for tokens/s the lowest and "
    "the highest one, too. *Tokens a part* is how many a part of the stream brings, which is a "
    "step's tokens. *As vanilla's* counts questions whose answer is vanilla's, letter by letter."
)


@dataclass(frozen=True)
class Cell:
    """One measurement; `method` is a name."""

    round: int
    users: int
    method: str

    def file(self, folder: Path) -> Path:
        return folder / "cells" / f"{self.round}-{self.users}-{self.method}.json"


def summarise(measured: dict[Cell, dict[str, Any]], begun: dict[str, Any]) -> dict[str, Any]:
    """The summary of all cells, with the run's settings and provenance (`begun`)."""
    names = list(dict.fromkeys(cell.method for cell in measured))
    users = list(dict.fromkeys(cell.users for cell in measured))
    rows = [summarise_row(measured, n, name) for n in users for name in names]
    others = [name for name in names if name != BASELINE and BASELINE in names]
    verdicts = [verdict(rows, name) for name in others]
    return {"rows": rows, "verdicts": verdicts, "users": users, **begun}


def summarise_row(measured: dict[Cell, dict[str, Any]], users: int, method: str) -> dict[str, Any]:
    """A method's medians over the rounds at a number of users."""

    def by_round(name: str) -> dict[int, dict[str, Any]]:
        return {c.round: m for c, m in measured.items() if (c.users, c.method) == (users, name)}

    rounds, base = by_round(method), by_round(BASELINE)
    row: dict[str, Any] = {"users": users, "method": method}
    for name in (*METRICS, "tokens_per_part"):
        values = [numbers[name] for numbers in rounds.values()]
        row[name], row[f"{name}_range"] = median(values), [min(values), max(values)]
    row["of_vanilla"] = row["of_vanilla_range"] = row["as_vanilla"] = None
    if base:
        ratios = {x: [rounds[i][x] / base[i][x] for i in rounds] for x in METRICS if row[x]}
        row["of_vanilla"] = {name: median(values) for name, values in ratios.items()}
        faster = ratios["tokens_per_second"]
        row["of_vanilla_range"] = [min(faster), max(faster)]
        texts = [
            (text, base[i]["texts"][question])
            for i, numbers in rounds.items()
            for question, text in numbers["texts"].items()
        ]
        row["as_vanilla"] = [sum(text == expected for text, expected in texts), len(texts)]
    return row


def verdict(rows: list[dict[str, Any]], method: str) -> str:
    """Where a method writes more tokens/s than vanilla in every round, and where fewer."""
    own = {row["users"]: row["of_vanilla_range"] for row in rows if row["method"] == method}
    more = [str(users) for users, (lowest, _) in own.items() if lowest > 1]
    fewer = [str(users) for users, (_, highest) in own.items() if highest < 1]
    faster, slower = (f"at {', '.join(x)}" if x else "at none" for x in (more, fewer))
    return (
        f"{method} writes more tokens/s than vanilla in every round {faster}, fewer {slower} of "
        "these numbers of users."
    )


def markdown(summary: dict[str, Any]) -> str:
    table, settings = [], summary["settings"]
    for row in summary["rows"]:
        cell = {"users": str(row["users"]), "method": row["method"]}
        for name, (heading, scale) in METRICS.items():
            value = row[name] * scale
            cell[heading] = number(value, 1 if value < 1000 else 0) if value else "-"
            if value and row["of_vanilla"] is not None:
                cell[heading] += f" ({row['of_vanilla'][name]:.2f}x)"
        if row["of_vanilla_range"] is not None:
            lowest, highest = row["of_vanilla_range"]
            cell["lowest-highest x"] = f"{lowest:.2f}-{highest:.2f}"
        cell["tokens a part"] = number(row["tokens_per_part"]) if row["tokens_per_part"] else "-"
        equal = row["as_vanilla"]
        table.append(cell | {"as vanilla's": "-" if equal is None else f"{equal[0]}/{equal[1]}"})
    provenance = summary["provenance"]
    how = f"temperature {settings['temperature']:g}, {'' if settings['stream'] else 'not '}streamed"
    parts = [
        f"{settings['requests']} requests of {settings['bench']}, {settings['max_new_tokens']} new "
        f"tokens each, {how}",
        tables.markdown(table),
        "\n".join(f"- {sentence}" for sentence in summary["verdicts"]),
        NOTES,
        f"`{provenance['command']}`, revision {provenance['git_revision']}, {provenance['time']}, "
        f"{describe_machine(provenance)}",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def curves(summary: dict[str, Any]) -> Figure:
    """Tokens/s, the first token and the whole answer by users; bars end at the extreme rounds."""
    first = summary["rows"][0]
    shown = [name for name in ("tokens_per_second", "first_token", "total") if first[name]]
    methods = list(dict.fromkeys(row["method"] for row in summary["rows"]))
    figure = Figure(figsize=(3.6 * len(shown), 3.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        heading, scale = METRICS[metric]
        for method, color in zip(methods, itertools.cycle(COLORS)):
            rows = [row for row in summary["rows"] if row["method"] == method]
            users = [row["users"] for row in rows]
            values = [(row[metric], *row[f"{metric}_range"]) for row in rows]
            y, low, high = scale * np.array(values).T
            errors = [y - low, high - y]
            axes.errorbar(users, y, errors, fmt="-o", ms=4, capsize=2, color=color, label=method)
        axes.set_xscale("log", base=2)
        axes.set_xticks(summary["users"], summary["users"])
        axes.set_xlabel("users", fontsize=9)
        axes.set_title(heading, fontsize=9, loc="left")
        axes.set_ylim(bottom=0)
        axes.grid(color=FAINT, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, frameon=False)
    return figure
