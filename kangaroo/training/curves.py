"""The metrics of a training run as a plot, for those without W&B."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from kangaroo.evaluation.plots import FAINT
from kangaroo.training.checkpoint import METRICS, read_metrics
from kangaroo.utils.errors import DataError

PLOT = "curves.png"
HEADINGS = {
    "loss": "Loss a position",
    "agreement": "Top-1 agreement",
    "expected_acceptance": "Expected acceptance, sampled",
    "compression_rate": "Compression rate, 6 draft tokens",
    "learning_rate": "Learning rate",
}
MARKS = {"train": "-", "held_out": "o-", "decode": "D"}  # how results are drawn, by their names


def write(folder: Path) -> None:
    """Make `curves.png` of a run's `metrics.jsonl`: every adapter's metrics over optimizer steps,
    of training as a line, of held-out text as dots, of decoding as diamonds.

    Errors: `DataError` where there is none, or nothing in it.
    """
    rows = read_metrics(folder)
    if not rows:
        raise DataError(f"'{folder}' has no training run's {METRICS}, or it is empty.")
    adapters = dict.fromkeys(k.split("/")[1] for row in rows for k in row if k.startswith("train/"))
    colors = matplotlib.color_sequences["tab20"]
    figure = Figure(figsize=(11.5, 6.6), layout="constrained")
    figure.suptitle(f"Training of {folder.name}", fontsize=12, x=0.01, ha="left")
    *panels, legend = figure.subplots(2, 3).flat
    for axes, (metric, heading) in zip(panels, HEADINGS.items(), strict=True):
        axes.set_title(heading, fontsize=10, loc="left")
        axes.set_xlabel("optimizer step", fontsize=8)
        axes.grid(color=FAINT, linewidth=0.8)
        for i, adapter in enumerate(adapters):
            for result, mark in MARKS.items():
                name = f"{result}/{adapter}/{metric}"
                points = [(row["step"], row[name]) for row in rows if name in row]
                steps, values = np.array(points, dtype=float).reshape(-1, 2).T
                axes.plot(steps, values, mark, color=colors[i % len(colors)], lw=1, ms=4)
    legend.axis("off")
    for i, adapter in enumerate(adapters):
        legend.plot([], [], color=colors[i % len(colors)], label=adapter)
    legend.legend(loc="upper left", frameon=False, fontsize=8)
    figure.savefig(folder / PLOT, dpi=150)
