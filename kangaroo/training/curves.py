"""The metrics of a training run as a table and as a plot, for those without W&B."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kangaroo.evaluation.plots import FAINT, INK
from kangaroo.training.checkpoint import METRICS
from kangaroo.utils.errors import DataError

TABLE, PLOT = "metrics.csv", "curves.png"
_POINTS = 60  # of a line: each is the mean of as many steps as it takes

Row = dict[str, float]


def write(folder: Path) -> None:
    """From a run's `metrics.jsonl` make `metrics.csv`, a row an optimizer step, and `curves.png`.

    Errors: `DataError` where there is none, or nothing in it.
    """
    rows = read(folder)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / TABLE).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)  # empty where a step has no such metric
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, folder.name).savefig(folder / PLOT, dpi=150)


def read(folder: Path) -> list[Row]:
    """The metrics of every step; a last line that is still being written is left out."""
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    if not rows:
        raise DataError(f"'{folder}' has no training run's {METRICS}, or it is empty.")
    return rows


def draw(rows: Sequence[Row], title: str) -> Figure:
    """Every adapter's metrics over optimizer steps: training as lines, held-out text as dots."""
    names = adapters(rows)
    # twenty that can be told apart; the tenth and the eleventh are unlike, unlike tab20's pairs
    shades = [*matplotlib.color_sequences["tab10"], *matplotlib.color_sequences["Set2"]]
    figure = Figure(figsize=(11.5, 6.6), layout="constrained")
    figure.suptitle(f"Training of {title}", fontsize=12, x=0.01, ha="left")
    panels = iter(figure.subplots(2, 3).flat)
    for metric, heading in (
        ("loss", "Loss a position"),
        ("agreement", "Top-1 agreement"),
        ("expected_acceptance", "Expected acceptance, sampled"),
        ("compression_rate", "Compression rate, 6 draft tokens"),
        ("learning_rate", "Learning rate"),
    ):
        axes = _panel(next(panels), heading, last=rows[-1]["step"])
        for i, name in enumerate(names):
            color = shades[i % len(shades)]
            trained = smooth(*series(rows, f"train/{name}/{metric}"))
            axes.plot(*trained, color=color, lw=1.2, alpha=0.5)
            held_out = series(rows, f"held_out/{name}/{metric}")
            axes.plot(*held_out, "o-", color=color, lw=1.2, ms=4.5, mec="white", mew=0.6)
            # another name, since what one expects the other counts
            measured = metric.replace("expected", "sampled")
            decoded = series(rows, f"decode/{name}/{measured}")
            axes.plot(*decoded, "D", color=color, ms=6, mec=INK, mew=0.8)
    _legend(next(panels), [(name, shades[i % len(shades)]) for i, name in enumerate(names)])
    return figure


def adapters(rows: Sequence[Row]) -> list[str]:
    """The names of a run's adapters, in order."""
    held = [name.split("/") for row in rows for name in row if name.startswith("train/")]
    return list(dict.fromkeys(parts[1] for parts in held))


def series(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric, where it is known."""
    known = [(row["step"], row[name]) for row in rows if name in row]
    steps, values = np.array(known, dtype=float).reshape(-1, 2).T
    return steps, values


def smooth(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most `_POINTS` points, each the mean of as many steps in a row."""
    count = max(1, -(-len(values) // _POINTS))
    starts = np.arange(0, len(values), count)
    if not len(starts):
        return steps, values
    sizes = np.diff([*starts, len(values)])
    return np.add.reduceat(steps, starts) / sizes, np.add.reduceat(values, starts) / sizes


def _panel(axes: Axes, heading: str, last: float) -> Axes:
    axes.set_title(heading, fontsize=10, loc="left")
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.set_xlim(0, 1.03 * last)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def _legend(axes: Axes, colors: Sequence[tuple[str, object]]) -> None:
    """A panel of its own, so that it covers no data."""
    axes.axis("off")
    for name, color in colors:
        axes.plot([], [], color=color, lw=3, label=name)
    axes.plot([], [], color=INK, lw=1.2, alpha=0.5, label="training, mean of steps")
    axes.plot([], [], "o-", color=INK, lw=1.2, ms=4.5, label="held-out text")
    axes.plot([], [], "D", color="white", ms=6, mec=INK, mew=0.8, label="decoded, measured")
    columns = 1 if len(colors) < 10 else 2
    axes.legend(loc="upper left", frameon=False, fontsize=8, ncols=columns)
