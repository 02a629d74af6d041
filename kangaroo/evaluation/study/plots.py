"""A study's plot: a row of panels a metric, a panel for our model and for each of the paper's."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kangaroo.evaluation.plots import COLORS, FAINT, HF, INK
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.study.study import Place, Point, Study, in_order

PER_ROW = 5  # entries of the legend


def plot(study: Study, subtitle: str) -> Figure:
    """All points, ours with their intervals. Places are one apart, whatever they are; a value
    without a place is a level.
    """
    points = [*study.points, *study.published]
    metrics, models = list(study.points[0].values), list(dict.fromkeys(p.model for p in points))
    places = [x for x in in_order(point.x for point in points) if x is not None]
    curves = in_order(point.curve for point in points)
    colors = {c: HF if c == AGAIN else COLORS[i % len(COLORS)] for i, c in enumerate(curves)}
    size = max(6.4, 4.1 * len(models)), 1.3 + 2.6 * len(metrics)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{study.config.title}: {subtitle}", fontsize=10, x=0.01, ha="left")
    panels = figure.subplots(len(metrics), len(models), squeeze=False, sharex=True, sharey="row")
    for metric, row in zip(metrics, panels, strict=True):
        for model, axes in zip(models, row, strict=True):
            axes.set_title(f"{metric.replace('_', ' ')}, {model}", fontsize=9, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color=FAINT, linewidth=0.8)
            axes.tick_params(labelsize=8)
            if metric == "speedup":
                axes.axhline(1, color=INK, linewidth=1, linestyle=":")
            for curve in curves:
                own = [p for p in points if (p.model, p.curve) == (model, curve)]
                _line(axes, metric, places, own, color=colors[curve])
            names = [study.word(x) for x in places]
            axes.set_xticks(range(len(names)), names, rotation=30 if len(names) > 6 else 0)
            axes.set_xlabel(study.config.x_label, fontsize=8)
    if len(curves) > 1:
        labels = [f"{study.config.curve_label} {study.word(curve)}".strip() for curve in curves]
        handles = [
            Line2D([], [], color=color, linewidth=2, label=label)
            for color, label in zip(colors.values(), labels, strict=True)
        ]
        figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=PER_ROW)
    return figure


def _line(
    axes: Axes, metric: str, places: list[float | str], points: list[Point], **look: Any
) -> None:
    """A curve of one panel with its intervals; words are not joined."""
    values = {point.x: v for point in points if (v := point.values.get(metric))}
    if None in values:
        axes.axhline(values.pop(None).value, **look)
    if values:
        joined = "-" if all(isinstance(x, float) for x in places) else ""
        ends = [v.ends or [v.value, v.value] for v in values.values()]
        lengths = [
            [max(0.0, v.value - low) for v, (low, _) in zip(values.values(), ends, strict=True)],
            [max(0.0, high - v.value) for v, (_, high) in zip(values.values(), ends, strict=True)],
        ]
        x = [_index(places, place) for place in values]
        y = [v.value for v in values.values()]
        axes.errorbar(x, y, lengths, marker="o", markersize=4.5, linestyle=joined, **look)


def _index(places: list[float | str], place: Place) -> int:
    return [*places, None].index(place)
