"""The metrics of a training run as a plot, for those without W&B."""

from itertools import cycle
from pathlib import Path

import matplotlib
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
    of training as a line, of held-out text as dots, of decoding as diamonds. Errors: `DataError`
    where there is none, or nothing in it."""
    rows = read_metrics(folder)
    if not rows:
        raise DataError(f"'{folder}' has no training run's {METRICS}, or it is empty.")
    adapters = dict.fromkeys(k.split("/")[1] for row in rows for k in row if k.startswith("train/"))
    colors = dict(zip(adapters, cycle(matplotlib.color_sequences["tab20"]), strict=False))
    figure = Figure(figsize=(11.5, 6.6), layout="constrained")
    figure.suptitle(f"Training of {folder.name}", fontsize=12, x=0.01, ha="left")
    *panels, legend = figure.subplots(2, 3).flat
    legend.axis("off")
    for axes, (metric, heading) in zip(panels, HEADINGS.items(), strict=True):
        axes.set_title(heading, fontsize=10, loc="left")
        axes.set_xlabel("optimizer step", fontsize=8)
        axes.grid(color=FAINT, linewidth=0.8)
        for adapter, color in colors.items():
            for result, mark in MARKS.items():
                name = f"{result}/{adapter}/{metric}"
                drawn = {row["step"]: row[name] for row in rows if name in row}
                axes.plot(list(drawn), list(drawn.values()), mark, color=color, lw=1, ms=4)
    for adapter, color in colors.items():
        legend.plot([], [], color=color, label=adapter)
    legend.legend(loc="upper left", frameon=False, fontsize=8)
    figure.savefig(folder / PLOT, dpi=150)
