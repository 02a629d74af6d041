"""The metrics of a training run as a table and as a plot, for those without W&B."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kangaroo.evaluation.plots import FAINT, INK
from kangaroo.training.checkpoint import METRICS, read_metrics
from kangaroo.utils.errors import DataError

TABLE, PLOT = "metrics.csv", "curves.png"
HEADINGS = {
    "loss": "Loss a position",
    "agreement": "Top-1 agreement",
    "expected_acceptance": "Expected acceptance, sampled",
    "compression_rate": "Compression rate, 6 draft tokens",
    "learning_rate": "Learning rate",
}
_POINTS = 60  # of a line: each is the mean of as many steps as it takes

Row = dict[str, float]


def write(folder: Path) -> None:
    """From a run's `metrics.jsonl` make `metrics.csv`, a row an optimizer step, and `curves.png`.

    Errors: `DataError` where there is none, or nothing in it.
    """
    rows = read_metrics(folder)
    if not rows:
        raise DataError(f"'{folder}' has no training run's {METRICS}, or it is empty.")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / TABLE).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)  # empty where a step has no such metric
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, folder.name).savefig(folder / PLOT, dpi=150)


def draw(rows: Sequence[Row], title: str) -> Figure:
    """Every adapter's metrics over optimizer steps: training as lines, held-out text as dots."""
    trained = [name.split("/")[1] for row in rows for name in row if name.startswith("train/")]
    # twenty that can be told apart; the tenth and the eleventh are unlike, unlike tab20's pairs
    shades = [*matplotlib.color_sequences["tab10"], *matplotlib.color_sequences["Set2"]]
    colors = dict(zip(dict.fromkeys(trained), itertools.cycle(shades), strict=False))
    line, dots = {"lw": 1.2, "alpha": 0.5}, {"lw": 1.2, "ms": 4.5}
    diamonds = {"ls": "", "marker": "D", "ms": 6, "mec": INK, "mew": 0.8}
    figure = Figure(figsize=(11.5, 6.6), layout="constrained")
    figure.suptitle(f"Training of {title}", fontsize=12, x=0.01, ha="left")
    *panels, last = figure.subplots(2, 3).flat
    for axes, (metric, heading) in zip(panels, HEADINGS.items(), strict=True):
        axes.set_title(heading, fontsize=10, loc="left")
        axes.set_xlabel("optimizer step", fontsize=8)
        axes.set_xlim(0, 1.03 * rows[-1]["step"])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=FAINT, linewidth=0.8)
        for name, color in colors.items():
            axes.plot(*_means(*_series(rows, f"train/{name}/{metric}")), color=color, **line)
            axes.plot(*_series(rows, f"held_out/{name}/{metric}"), "o-", color=color, **dots)
            # another name, since what one expects the other counts
            decoded = _series(rows, f"decode/{name}/{metric.replace('expected', 'sampled')}")
            axes.plot(*decoded, color=color, **diamonds)
    last.axis("off")  # the legend has a panel of its own, so that it covers no data
    for name, color in colors.items():
        last.plot([], [], color=color, lw=3, label=name)
    last.plot([], [], color=INK, label="training, mean of steps", **line)
    last.plot([], [], "o-", color=INK, label="held-out text", **dots)
    last.plot([], [], color="white", label="decoded, measured", **diamonds)
    last.legend(loc="upper left", frameon=False, fontsize=8, ncols=1 + (len(colors) >= 10))
    return figure


def _series(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric, where it is known."""
    points = [(row["step"], row[name]) for row in rows if name in row]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return steps, values


def _means(steps: np.ndarray, values: np.ndarray) -> list[list[float]]:
    """At most `_POINTS` points, each the mean of as many steps in a row."""
    count = max(1, -(-len(values) // _POINTS))
    starts = range(0, len(values), count)
    return [[x[i : i + count].mean() for i in starts] for x in (steps, values)]
