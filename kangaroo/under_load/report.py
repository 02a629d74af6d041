"""From cells to a table, plots, and up to how many users drafting pays."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from kangaroo.evaluation import records as store
from kangaroo.evaluation.plots import COLORS, FAINT, VANILLA
from kangaroo.under_load.client import Measured
from kangaroo.under_load.config import BASELINE, Cell
from kangaroo.utils import tables
from kangaroo.utils.provenance import machine
from kangaroo.utils.tables import Row, number

RESULTS, PAGE, PLOT = "load.json", "load.md", "load.png"
# By their names in `Measured`: heading, title of the plot, and what they are multiplied by there.
METRICS = {
    "tokens_per_second": ("tokens/s", "tokens/s of all users together", 1.0),
    "first_token": ("first token, ms", "time to the first token, ms", 1000.0),
    "between_tokens": ("between tokens, ms", "time from token to token, ms", 1000.0),
    "total": ("total, s", "time of a whole answer, s", 1.0),
}
NOTES = (
    "Means over the requests of a cell, as guidellm measures them, and of these the median of the "
    "rounds; *x* is the median ratio to vanilla in the same round. *Tokens a part* is how many a "
    "part of the stream brings, which is a step's tokens. *As vanilla's* counts questions whose "
    "answer is vanilla's, letter by letter."
)


def summarise(measured: Mapping[Cell, Measured], begun: dict[str, Any]) -> dict[str, Any]:
    """What all files are made from.

    Args:
        begun: settings and provenance of the run.
    """
    names = list(dict.fromkeys(cell.method for cell in measured))
    users = list(dict.fromkeys(cell.users for cell in measured))
    rows = [_row(measured, many, name) for many in users for name in names]
    others = [name for name in names if name != BASELINE] if BASELINE in names else []
    return {
        "rows": rows,
        "pays_up_to": {name: pays_up_to(rows, name) for name in others},
        "users": users,
        "rounds": 1 + max(cell.number for cell in measured),
        **begun,
    }


def pays_up_to(rows: Sequence[Mapping[str, Any]], method: str) -> int:
    """The most users at whom, and below whom, a method writes more tokens/s than vanilla; 0 where
    it never does.
    """
    most = 0
    for row in rows:
        if row["method"] == method:
            if row["of_vanilla"]["tokens_per_second"] <= 1:
                break
            most = row["users"]
    return most


def _row(measured: Mapping[Cell, Measured], users: int, method: str) -> dict[str, Any]:
    """A method at a number of users."""
    own = {c.number: m for c, m in measured.items() if (c.users, c.method) == (users, method)}
    base = {c.number: m for c, m in measured.items() if (c.users, c.method) == (users, BASELINE)}
    row: dict[str, Any] = {"users": users, "method": method}
    for name in (*METRICS, "tokens_per_part"):
        row[name] = median(getattr(one, name) for one in own.values())
    speeds = [one.tokens_per_second for one in own.values()]
    row["tokens_per_second_range"] = [min(speeds), max(speeds)]
    row["of_vanilla"] = row["as_vanilla"] = None
    if base:
        row["of_vanilla"] = {
            name: median(getattr(own[i], name) / getattr(base[i], name) for i in own)
            for name in METRICS
        }
        same = [own[i].texts[text] == base[i].texts[text] for i in own for text in own[i].texts]
        row["as_vanilla"] = [sum(same), len(same)]
    return row


def cells_of(row: Mapping[str, Any]) -> Row:
    """A row of the table."""
    found = {"users": str(row["users"]), "method": row["method"]}
    for name, (heading, _, scale) in METRICS.items():
        value = row[name] * scale
        found[heading] = number(value, 1 if value < 1000 else 0)
        if row["of_vanilla"] is not None:
            found[heading] += f" ({row['of_vanilla'][name]:.2f}x)"
    found["tokens a part"] = number(row["tokens_per_part"])
    same = row["as_vanilla"]
    found["as vanilla's"] = "-" if same is None else f"{same[0]}/{same[1]}"
    return found


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """Up to how many users each method pays."""
    most, found = summary["users"][-1], []
    for name, users in summary["pays_up_to"].items():
        if users == 0:
            found.append(f"{name} writes no more tokens/s than vanilla at any number of users.")
        elif users == most:
            found.append(f"{name} writes more tokens/s than vanilla at all numbers of users.")
        else:
            after = next(many for many in summary["users"] if many > users)
            up_to = f"{users} user{'s' if users > 1 else ''}"
            found.append(
                f"{name} writes more tokens/s than vanilla up to {up_to}, and no longer at {after}."
            )
    return found


def about(summary: Mapping[str, Any]) -> str:
    """What was measured, in words."""
    settings = summary["settings"]
    return (
        f"{settings['model.name']}, {settings['requests']} requests of {settings['bench']} with "
        f"{settings['new_tokens']} new tokens each, greedy, rounds: {summary['rounds']}"
    )


def terminal_table(summary: Mapping[str, Any]) -> Table:
    """For a rich console."""
    rows = [cells_of(row) for row in summary["rows"]]
    return tables.terminal(rows, about(summary), "\n".join(sentences(summary)))


def markdown(summary: Mapping[str, Any]) -> str:
    """The page."""
    begun = summary["provenance"]
    parts = [
        "# Under load",
        f"{about(summary)}.",
        tables.markdown([cells_of(row) for row in summary["rows"]]),
        *sentences(summary),
        f"![{', '.join(title for _, title, _ in METRICS.values())}]({PLOT})",
        NOTES,
        f"`{begun['command']}`, revision {begun['git_revision']}, {begun['time']}, "
        f"{machine(begun)}",
    ]
    return "\n\n".join(parts) + "\n"


def plot(summary: Mapping[str, Any]) -> Figure:
    """A panel for each metric, over the users."""
    figure = Figure(figsize=(9.6, 6.6), layout="constrained")
    figure.suptitle(about(summary), fontsize=10, x=0.01, ha="left")
    panels = figure.subplots(2, 2)
    names = list(dict.fromkeys(row["method"] for row in summary["rows"]))
    for axes, (metric, (_, title, scale)) in zip(panels.flat, METRICS.items(), strict=True):
        _panel(axes, title, summary["users"])
        for name, color in zip(names, _colors(names), strict=True):
            own = [row for row in summary["rows"] if row["method"] == name]
            values = [row[metric] * scale for row in own]
            at = [row["users"] for row in own]
            axes.plot(at, values, "o-", color=color, markersize=4, linewidth=1.6, label=name)
        axes.set_ylim(bottom=0)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def _colors(names: Sequence[str]) -> list[str]:
    """One each, however many there are; vanilla's is the same in all plots."""
    others = itertools.cycle(color for color in COLORS if color != VANILLA)
    return [VANILLA if name == BASELINE else next(others) for name in names]


def _panel(axes: Axes, title: str, users: Sequence[int]) -> None:
    """Users along the bottom, each twice as many as the one before equally far."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(users, [str(many) for many in users])
    axes.set_xlabel("users at the same time", fontsize=8)


def write(summary: dict[str, Any], folder: Path) -> None:
    """All three files."""
    store.write_json(folder / RESULTS, summary)
    (folder / PAGE).write_text(markdown(summary), encoding="utf-8")
    plot(summary).savefig(folder / PLOT, dpi=150)
