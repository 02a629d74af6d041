"""The plot of methods side by side, and colours for all plots."""

from collections.abc import Sequence
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

from kangaroo.evaluation.records import AGAIN

rcParams["text.parse_math"] = False  # a name may hold dollars

METHOD = "#d9772b"
VANILLA = "#3b6fb6"
HF = "#8a8f98"
OTHER = "#e9b184"  # methods that are not emphasized
INK = "#222222"
FAINT = "#dddddd"


def speedup_bars(rows: Sequence[tuple[str, dict[str, Any]]], subtitle: str) -> Figure:
    """Speedups with intervals, and their upper bounds, the compression rates; the first row is on
    top and emphasized."""
    figure = Figure(figsize=(7.6, 1.9 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"Speedup over vanilla decoding, {subtitle}", fontsize=8, loc="left")
    for y, (name, m) in enumerate(rows):
        if m["speedup"] is None:
            continue
        color = {"vanilla": VANILLA, AGAIN: VANILLA, "transformers": HF}.get(name, OTHER)
        axes.barh(y, m["speedup"], height=0.62, color=METHOD if y == 0 else color)
        if m["speedup_ci95"] is not None:
            axes.plot(m["speedup_ci95"], [y, y], color=INK, linewidth=1.4)
        axes.plot(m["compression_rate"], y, "D", markersize=5, color=INK)
        axes.text(0.02, y, f" {m['speedup']:.2f}x", va="center", fontsize=9, color=INK)
    axes.axvline(1, color=INK, linewidth=1, linestyle=":", label="vanilla")
    axes.plot([], [], color=INK, linewidth=1.4, label="95% interval")
    axes.plot([], [], "D", color=INK, markersize=5, label="compression rate")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure
