"""The plots of an evaluation, and of methods side by side: each a figure made from a summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure

from kangaroo.evaluation.records import AGAIN

rcParams["text.parse_math"] = False  # a task's name may hold dollars

METHOD, VANILLA, HF = "#d9772b", "#3b6fb6", "#8a8f98"
FURTHER = "#e9b184"  # of what is not in the foreground
INK, FAINT = "#222222", "#dddddd"
PARTS = {"prefill": "#c9ccd1", "draft": "#d9772b", "verify": "#3b6fb6", "host": "#7a5195"}
COLORS = ["#d9772b", "#3b6fb6", "#54a24b", "#7a5195", "#b79a20", "#72b7b2", "#9d755d", "#c65b9b"]
SHADES = ["#4c78a8", "#72b7b2", "#54a24b", "#b79a20", "#b279a2", "#9d755d"]  # of tasks
SLOWER_FASTER = LinearSegmentedColormap.from_list("", ["#8fb0d9", "#ffffff", METHOD])
NAMES = {  # of tasks, where they are not their own
    "mt_bench": "MT-bench",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
}

Results = dict[str, Any]


def groups(summary: dict[str, Any]) -> list[tuple[str, Results]]:
    """The metrics of each task and of all, by name."""
    return [*summary["by_task"].items(), ("overall", summary["overall"])]


def about(summary: dict[str, Any]) -> str:
    """What the plots are of, in words; of a comparison without a drafter."""
    method = f" with {summary['drafter']}" if "drafter" in summary else ""
    return "{model}{method} on {bench}, {dtype}, {device}".format(method=method, **summary)


# --- of one method


def speedup(summary: dict[str, Any]) -> Figure:
    """Speedup over vanilla by task, and overall."""
    return speedup_bars(_overall_first(summary), about(summary), accent="overall")


def _overall_first(summary: dict[str, Any]) -> list[tuple[str, Results]]:
    *tasks, overall = groups(summary)
    return [overall, *tasks]


def speedup_bars(rows: Sequence[tuple[str, Results]], subtitle: str, accent: str) -> Figure:
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
            x = m["compression_rate"]
            axes.plot(x, y, marker="D", markersize=5, color=INK, linestyle="")
        axes.text(0.02, y, f" {m['speedup']:.2f}x", va="center", fontsize=9, color=INK)
    axes.axvline(1, color=INK, linewidth=1, linestyle=":")
    axes.plot([], [], color=INK, linewidth=1.4, label="95% interval")
    axes.plot([], [], "D", color=INK, markersize=5, label="compression rate")
    axes.plot([], [], color=INK, linewidth=1, linestyle=":", label="vanilla")
    _name_rows(axes, [name for name, _ in rows])
    _legend(figure)
    return figure


def ctar(summary: dict[str, Any]) -> Figure:
    """CTAR by position: bold over all questions, faint by task."""
    figure, axes = blank(
        about(summary), 3.6, "Share of rounds whose first w draft tokens are accepted"
    )
    for i, (task, m) in enumerate(summary["by_task"].items()):
        thin: dict[str, Any] = dict(linewidth=1.2, markersize=3, alpha=0.8, marker="o")
        thin |= dict(color=SHADES[i % len(SHADES)], label=NAMES.get(task, task))
        axes.plot(range(1, len(m["ctar"]) + 1), m["ctar"], **thin)
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
    rows = _overall_first(summary)
    figure, axes = blank(about(summary), 1.0 + 0.42 * len(rows), "Time per token, ms")
    for y, (_, m) in enumerate(rows):
        left = 0.0
        for part, color in PARTS.items():
            width = 1e3 * m[f"{part}_seconds"] / m["tokens"]
            axes.barh(y, width, left=left, height=0.62, color=color, label="" if y else part)
            left += width
        for name, color in (("vanilla", INK), ("hf", HF)):
            if m[f"{name}_tokens_per_second"] is not None:
                x = 1e3 / m[f"{name}_tokens_per_second"]
                axes.plot([x, x], [y - 0.42, y + 0.42], color=color, linewidth=2.2)
                if y == 0:  # a bar without extent: the legend lists bars after lines
                    axes.barh(0, 0, color=color, label=f"{name}, total")
    _name_rows(axes, [name for name, _ in rows])
    _legend(figure)
    return figure


OF_A_METHOD = {"speedup": speedup, "ctar": ctar, "time": time_split}


# --- of methods side by side


def speedup_of_methods(comparison: dict[str, Any]) -> Figure:
    """Speedup and compression rate of each method, the fastest on top."""
    overall = [method["overall"] for method in comparison["methods"]]
    rows = list(zip(_labels(comparison), overall, strict=True))
    return speedup_bars(rows, about(comparison), accent=rows[0][0])


def speedup_by_task(comparison: dict[str, Any]) -> Figure:
    """The speedup by task and method."""
    return _map(comparison, "speedup", "Speedup over vanilla decoding, by task")


def cr_by_task(comparison: dict[str, Any]) -> Figure:
    """The compression rate by task and method."""
    return _map(comparison, "compression_rate", "Compression rate, by task")


OF_METHODS = {
    "speedup": speedup_of_methods,
    "speedup_by_task": speedup_by_task,
    "cr_by_task": cr_by_task,
}


def tasks(methods: Sequence[dict[str, Any]]) -> list[str]:
    """The bench's, and "overall"."""
    return [*max((method["by_task"] for method in methods), key=len), "overall"]


def _labels(comparison: dict[str, Any]) -> list[str]:
    """The methods' names, a drafter's settings on a line of their own."""
    return [method["name"].replace(",", "\n", 1) for method in comparison["methods"]]


def _map(comparison: dict[str, Any], metric: str, title: str) -> Figure:
    """A coloured table: methods down the side, tasks along; white is vanilla's 1."""
    names, columns = _labels(comparison), tasks(comparison["methods"])
    rows = [dict(groups(method)) for method in comparison["methods"]]
    values = [[row.get(task, {}).get(metric) for task in columns] for row in rows]
    measured = [value for row in values for value in row if value is not None]
    norm = TwoSlopeNorm(1, min([0.5, *measured]), max([2, *measured]))
    figure, axes = blank(about(comparison), 0.6 + 0.36 * len(names), title)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value is not None:
                color = SLOWER_FASTER(norm(value))
                axes.barh(y, 1, left=x - 0.5, height=1, color=color, edgecolor="white")
                weight = "bold" if columns[x] == "overall" else "normal"
                text: dict[str, Any] = dict(ha="center", va="center", fontsize=9, weight=weight)
                axes.text(x, y, f"{value:.2f}", color=INK, **text)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(len(columns)), [NAMES.get(task, task) for task in columns])
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


# --- what they share


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


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names down the side, the first row on top."""
    axes.set_yticks(range(len(names)), [NAMES.get(name, name) for name in names])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside lower center", ncols=7, frameon=False, fontsize=9)
