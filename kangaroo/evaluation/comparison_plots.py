"""Plots of methods side by side, each a figure made from a comparison."""

from __future__ import annotations

from typing import Any

from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure

from kangaroo.evaluation import plots

SLOWER_FASTER = LinearSegmentedColormap.from_list("", ["#8fb0d9", "#ffffff", plots.METHOD])


def speedup(found: dict[str, Any]) -> Figure:
    """Speedup and compression rate of each method, the fastest on top."""
    rows = [(_name(method), method["overall"]) for method in found["methods"]]
    return plots.speedup_bars(rows, about(found), accent=rows[0][0])


def speedup_by_task(found: dict[str, Any]) -> Figure:
    """Bars of the speedup with their intervals, by task and method."""
    return _map(found, "speedup", "Speedup over vanilla decoding, by task")


def cr_by_task(found: dict[str, Any]) -> Figure:
    """Bars of the compression rate, by task and method."""
    return _map(found, "compression_rate", "Compression rate, by task")


PLOTS = {"speedup": speedup, "speedup_by_task": speedup_by_task, "cr_by_task": cr_by_task}


def tasks(found: dict[str, Any]) -> list[str]:
    """The bench's, and "overall": what `value_of` knows."""
    return [*max((method["by_task"] for method in found["methods"]), key=len), "overall"]


def value_of(method: dict[str, Any], task: str, metric: str) -> float | None:
    """A metric of a method under a task, or overall; None where it was asked nothing of it."""
    results = {"overall": method["overall"]} | method["by_task"]
    return results[task][metric] if task in results else None


def about(found: dict[str, Any]) -> str:
    """What the plots are of, in words."""
    return "{model} on {bench}, {dtype}, {device}".format(**found)


def _name(method: dict[str, Any]) -> str:
    """With a drafter's settings on a line of their own."""
    return method["name"].replace(",", "\n", 1)


def _map(found: dict[str, Any], metric: str, title: str) -> Figure:
    """A coloured table: methods down the side, tasks along; white is vanilla's 1."""
    names, columns = [_name(method) for method in found["methods"]], tasks(found)
    values = [[value_of(method, task, metric) for task in columns] for method in found["methods"]]
    known = [value for row in values for value in row if value is not None]
    norm = TwoSlopeNorm(1, min([0.5, *known]), max([2, *known]))
    result, axes = plots.blank(about(found), 0.6 + 0.36 * len(names), title)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value is not None:
                color = SLOWER_FASTER(norm(value))
                axes.barh(y, 1, left=x - 0.5, height=1, color=color, edgecolor="white")
                weight = "bold" if columns[x] == "overall" else "normal"
                middle: dict[str, Any] = dict(ha="center", va="center", fontsize=9, color=plots.INK)
                axes.text(x, y, f"{value:.2f}", fontweight=weight, **middle)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(len(columns)), [plots.NAMES.get(task, task) for task in columns])
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["left", "bottom"]].set_visible(False)
    return result
