"""The report's plots, each a figure made from a summary."""

from __future__ import annotations

from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kangaroo.evaluation.records import AGAIN

rcParams["text.parse_math"] = False  # a task's name may hold dollars

METHOD, VANILLA, HF = "#d9772b", "#3b6fb6", "#8a8f98"
FURTHER = "#e9b184"  # of what is not in the foreground
INK, FAINT = "#222222", "#dddddd"
PARTS = {"prefill": "#c9ccd1", "draft": "#d9772b", "verify": "#3b6fb6", "host": "#7a5195"}
NAMES = {  # of tasks, where they are not their own
    "mt_bench": "MT-bench",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
}


def speedup(summary: dict[str, Any]) -> Figure:
    """Speedup over vanilla by task."""
    return speedup_bars(_rows(summary), about(summary), accent="overall")


def speedup_bars(rows: list[tuple[str, dict[str, Any]]], subtitle: str, accent: str) -> Figure:
    """Speedups with their intervals and the compression rates, their upper bound.

    Args:
        accent: the name of the row that stands out.
    """
    figure, axes = blank(subtitle, 1.0 + 0.42 * len(rows), "Speedup over vanilla decoding")
    for y, (name, m) in enumerate(rows):
        if m["speedup"] is None:
            continue
        color = {"vanilla": VANILLA, AGAIN: VANILLA, "transformers": HF}.get(name, FURTHER)
        axes.barh(y, m["speedup"], height=0.62, color=METHOD if name == accent else color)
        if m["speedup_ci95"] is not None:
            axes.plot(m["speedup_ci95"], [y, y], color=INK, linewidth=1.4, solid_capstyle="butt")
        if m["compression_rate"] is not None:  # transformers tells no rounds
            at = m["compression_rate"]
            axes.plot(at, y, marker="D", markersize=5, color=INK, linestyle="")
        axes.text(0.02, y, f" {m['speedup']:.2f}x", va="center", fontsize=9, color=INK)
    axes.axvline(1, color=INK, linewidth=1, linestyle=":")
    axes.plot([], [], color=INK, linewidth=1.4, label="95% interval")
    axes.plot([], [], "D", color=INK, markersize=5, label="compression rate")
    axes.plot([], [], color=INK, linewidth=1, linestyle=":", label="vanilla")
    _tasks(axes, rows)
    _legend(figure)
    return figure


def ctar(summary: dict[str, Any]) -> Figure:
    """CTAR by position: bold over all questions, faint by task."""
    figure, axes = blank(
        about(summary), 3.6, "Share of rounds whose first w draft tokens are accepted"
    )
    shades = ["#4c78a8", "#72b7b2", "#54a24b", "#b79a20", "#b279a2", "#9d755d"]
    for i, (task, m) in enumerate(summary["by_task"].items()):
        positions = range(1, len(m["ctar"]) + 1)
        label = NAMES.get(task, task)
        thin: dict[str, Any] = dict(linewidth=1.2, markersize=3, alpha=0.8, label=label)
        axes.plot(positions, m["ctar"], color=shades[i % len(shades)], marker="o", **thin)
    overall = summary["overall"]["ctar"]
    bold: dict[str, Any] = dict(linewidth=2.6, markersize=6, label="overall")
    axes.plot(range(1, len(overall) + 1), overall, color=METHOD, marker="o", **bold)
    above: dict[str, Any] = dict(xytext=(0, 8), textcoords="offset points", ha="center")
    for w, value in enumerate(overall, start=1):
        axes.annotate(f"{value:.2f}", (w, value), fontsize=9, color=INK, **above)
    axes.set_xticks(range(1, len(overall) + 1))
    axes.set_xlim(0.7, len(overall) + 0.3)
    axes.set_xlabel("w, position in the draft", fontsize=9)
    axes.set_ylim(0, 1.05)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    _legend(figure)
    return figure


def time_split(summary: dict[str, Any]) -> Figure:
    """Milliseconds a token of the method in its parts, and vanilla's and hf's totals as marks."""
    rows = _rows(summary)
    figure, axes = blank(about(summary), 1.0 + 0.42 * len(rows), "Time per token, ms")
    for y, (_, m) in enumerate(rows):
        left = 0.0
        for part, color in PARTS.items():
            width = 1e3 * m[f"{part}_seconds"] / m["tokens"]
            axes.barh(y, width, left=left, height=0.62, color=color, label="" if y else part)
            left += width
        for name, color in (("vanilla", INK), ("hf", HF)):
            if m[f"{name}_tokens_per_second"] is not None:
                at = 1e3 / m[f"{name}_tokens_per_second"]
                axes.plot([at, at], [y - 0.42, y + 0.42], color=color, linewidth=2.2)
                if y == 0:  # a bar without extent: the legend lists bars after lines
                    axes.barh(0, 0, color=color, label=f"{name}, total")
    _tasks(axes, rows)
    _legend(figure)
    return figure


def _rows(summary: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("overall", summary["overall"]), *summary["by_task"].items()]


def about(summary: dict[str, Any]) -> str:
    """What the plots are of, in words."""
    return "{model} with {drafter} on {bench}, {dtype}, {device}".format(**summary)


def blank(subtitle: str, height: float, title: str) -> tuple[Figure, Axes]:
    """A figure with one empty plot below its title."""
    figure = Figure(figsize=(7.6, height + 0.9), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)
    axes.set_title(title, fontsize=11, loc="left", pad=18)
    place: dict[str, Any] = dict(xycoords="axes fraction", textcoords="offset points")
    axes.annotate(subtitle, (0, 1), (0, 4), fontsize=8, color="#666666", **place)
    return figure, axes


def _tasks(axes: Axes, rows: list[tuple[str, dict[str, Any]]]) -> None:
    """Task names down the side, the first row on top."""
    axes.set_yticks(range(len(rows)), [NAMES.get(task, task) for task, _ in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=9)
