"""A study's plot: a row of panels a metric, in it one for our model and for each of the paper's."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kangaroo.evaluation.metrics import Estimate
from kangaroo.evaluation.plots import FAINT, HF, INK
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.study.study import Place, Study, heading_of, in_order, word

COLORS = ["#d9772b", "#3b6fb6", "#54a24b", "#7a5195", "#b79a20", "#72b7b2", "#9d755d", "#c65b9b"]


def plot(study: Study) -> Figure:
    """All points, ours with their intervals. Places are one apart, whatever they are; a value
    without a place is a level.
    """
    points, config = [*study.points, *study.published], study.config
    metrics, models = list(study.points[0].values), list(dict.fromkeys(p.model for p in points))
    places = [x for x in in_order(point.x for point in points) if x is not None]
    names = [word(config.x, x) for x in places]
    curves = in_order(point.curve for point in points)
    colors = {c: HF if c == AGAIN else COLORS[i % len(COLORS)] for i, c in enumerate(curves)}
    size = max(6.4, 4.1 * len(models)), 1.3 + 2.6 * len(metrics)
    figure = Figure(figsize=size, layout="constrained")
    about = "{model} on {bench}, {dtype}, {device}".format(**study.methods[0].summary)
    figure.suptitle(f"{config.title}: {about}", fontsize=10, x=0.01, ha="left")
    panels = figure.subplots(len(metrics), len(models), squeeze=False, sharex=True, sharey="row")
    for metric, row in zip(metrics, panels, strict=True):
        for model, axes in zip(models, row, strict=True):
            if not any(p.values.get(metric) for p in points if p.model == model):
                axes.set_axis_off()
                continue
            axes.set_title(f"{heading_of(metric)}, {model}", fontsize=9, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color=FAINT, linewidth=0.8)
            axes.tick_params(labelsize=8)
            if metric == "speedup":
                axes.axhline(1, color=INK, linewidth=1, linestyle=":")
            for i, (curve, color) in enumerate(colors.items()):
                values = {
                    p.x: value
                    for p in points
                    if (p.model, p.curve) == (model, curve) and (value := p.values.get(metric))
                }
                _draw(axes, places, values, color, (i + 0.5) / len(colors) - 0.5)
            axes.set_xticks(range(len(names)), names)
            axes.tick_params("x", rotation=30 if len("".join(names)) > 30 else 0)
    for axes in panels[-1]:
        axes.set_xlabel(config.x.rpartition(".")[2].replace("_", " "), fontsize=8)
    handles = [
        Line2D([], [], color=color, linewidth=2, label=_label(study, curve))
        for curve, color in colors.items()
        if curve != ""
    ]
    if handles:
        figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=5)
    return figure


def _label(study: Study, curve: Place) -> str:
    name = word(study.config.curve, curve)
    return f"{study.config.curve_label} {name}" if isinstance(curve, float) else name


def _draw(
    axes: Axes,
    places: list[float | str],
    values: dict[Place, Estimate],
    color: str,
    shift: float,
) -> None:
    """A curve of one panel with its intervals. Words are not joined, and shifted by curve."""
    if level := values.pop(None, None):
        axes.axhline(level.value, color=color)
    estimates = [values[place] for place in places if place in values]
    joined = all(isinstance(x, float) for x in places)
    x = [i + (0 if joined else 0.8 * shift) for i, place in enumerate(places) if place in values]
    y = [v.value for v in estimates]
    ends = [v.ends or [v.value, v.value] for v in estimates]
    below = [max(0.0, value - low) for value, (low, _) in zip(y, ends, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(y, ends, strict=True)]
    axes.errorbar(x, y, [below, above], marker="o", ms=4.5, ls="-" if joined else "", color=color)
