"""A study's plot: one x axis, a curve for each method, a panel for each metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kangaroo.evaluation.plots import FAINT, HF, INK, NAMES
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.study.points import Place, Point, in_order
from kangaroo.evaluation.study.published import Published
from kangaroo.evaluation.study.study import StudyConfig

COLORS = ["#d9772b", "#3b6fb6", "#54a24b", "#7a5195", "#b79a20", "#72b7b2", "#9d755d", "#c65b9b"]
TITLES = {
    "speedup": "speedup over vanilla decoding",
    "compression_rate": "compression rate",
    "acceptance_rate": "share of draft tokens accepted",
    "ctar": "CTAR(w)",
    "ctar1": "CTAR(1)",
}
# Of the models in the paper; ours are circles and whole lines.
MARKERS = [("D", "--"), ("s", ":"), ("^", "-.")]


def plot(
    study: StudyConfig, ours: Sequence[Point], theirs: Sequence[Published], subtitle: str
) -> Figure:
    """The points with their intervals as circles; hollow and dashed are the paper's.

    Methods by task have panels of their own, ours and the paper's side by side.
    """
    metrics = list(ours[0].values)
    apart = study.x == "task" and bool(theirs)
    rows, columns = (len(metrics), 2) if apart else (1, len(metrics))
    size = max(6.4, 4.1 * columns), 1.3 + 2.6 * rows
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{study.title}: {subtitle}", fontsize=10, x=0.01, ha="left")
    panels = figure.subplots(rows, columns, squeeze=False, sharey="row" if apart else False)
    scale = Scale(study, ours, theirs)
    for i, metric in enumerate(metrics):
        title = TITLES.get(metric, metric)
        if apart:
            scale.draw(panels[i, 0], f"{title}, here", metric, ours, [])
            scale.draw(panels[i, 1], f"{title}, the paper", metric, [], theirs)
        else:
            scale.draw(panels[0, i], title, metric, ours, theirs)
    handles = scale.legend()
    if len(handles) > 1:
        columns = min(len(handles), 4 if size[0] < 8 else 5)
        figure.legend(
            handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
        )
    return figure


class Scale:
    """Where places lie and which colours curves have, the same in all panels of a study."""

    def __init__(self, study: StudyConfig, ours: Sequence[Point], theirs: Sequence[Published]):
        self.study = study
        places = [(point.curve, point.x) for point in ours]
        places += [(one.curve, one.x) for one in theirs]
        along = in_order(x for _, x in places)
        self.places: list[float | str] = [x for x in along if x is not None]
        self.words = [x for x in self.places if isinstance(x, str)]
        self.curves = in_order(curve for curve, _ in places)
        self.models = list(dict.fromkeys(one.model for one in theirs))

    def at(self, x: float | str, curve: Place) -> float:
        """Along the plot; words are one apart, and the curves beside each other there."""
        if isinstance(x, float):
            return x
        beside = self.curves.index(curve) - (len(self.curves) - 1) / 2
        return self.places.index(x) + 0.8 * beside / len(self.curves)

    def draw(
        self,
        axes: Axes,
        title: str,
        metric: str,
        ours: Sequence[Point],
        theirs: Sequence[Published],
    ) -> None:
        """One panel."""
        axes.set_title(title, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
        if metric == "speedup":
            axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        for curve in self.curves:
            color = self.color(curve)
            for model, (marker, dashes) in zip(self.models, MARKERS, strict=False):
                told = {
                    one.x: one.values[metric]
                    for one in theirs
                    if (one.model, one.curve) == (model, curve) and metric in one.values
                }
                look: dict[str, Any] = dict(linestyle=dashes, linewidth=1, alpha=0.7, color=color)
                self.line(axes, curve, told, markerfacecolor="white", marker=marker, **look)
            own = [point for point in ours if point.curve == curve]
            values = {point.x: v.value for point in own if (v := point.values[metric])}
            self.line(axes, curve, values, marker="o", linewidth=1.6, color=color)
            self.intervals(axes, curve, own, metric)
        self.ticks(axes)

    def line(self, axes: Axes, curve: Place, values: dict[Place, float], **look: Any) -> None:
        """A curve; words are not joined, and a value without a place is a level."""
        if None in values:
            level = {k: look[k] for k in ("color", "linewidth", "linestyle", "alpha") if k in look}
            axes.axhline(values[None], **level)
        known = {x: value for x, value in values.items() if x is not None}
        if self.words:
            look |= {"linestyle": ""}
        if known:
            at = [self.at(x, curve) for x in known]
            axes.plot(at, list(known.values()), markersize=4.5, **look)

    def intervals(self, axes: Axes, curve: Place, own: Sequence[Point], metric: str) -> None:
        """A band along a curve, where the lines of several would hide each other; else lines."""
        ends = [
            (self.at(point.x, curve), v.low, v.high)
            for point in own
            if point.x is not None
            and (v := point.values[metric]) is not None
            and v.low is not None
            and v.high is not None
        ]
        color = self.color(curve)
        if self.words or len(ends) == 1 or len(self.curves) == 1:
            for at, low, high in ends:
                axes.plot([at, at], [low, high], color=color, linewidth=1, alpha=0.7)
        elif ends:
            at_P, low_P, high_P = zip(*ends, strict=True)
            axes.fill_between(at_P, low_P, high_P, color=color, alpha=0.12, linewidth=0)

    def ticks(self, axes: Axes) -> None:
        """The places, and what they are of."""
        if self.words:
            names = [NAMES.get(x, x) for x in self.words]
            turned: dict[str, Any] = dict(rotation=30, ha="right") if len(names) > 3 else {}
            axes.set_xticks(range(len(names)), names, **turned)
            axes.set_xlim(-0.5, len(names) - 0.5)
        elif self.study.log_x:
            axes.set_xscale("log")
        elif len(self.places) <= 10:
            axes.set_xticks([x for x in self.places if isinstance(x, float)])
        if not self.words:
            axes.set_xlabel(self.study.x_label, fontsize=8)

    def color(self, curve: Place) -> str:
        """Of a curve; the noise floor is grey."""
        if curve == AGAIN:
            return HF
        return COLORS[self.curves.index(curve) % len(COLORS)]

    def legend(self) -> list[Line2D]:
        """What colours and marks stand for."""
        of = f"{self.study.curve_label} " if self.study.curve_label else ""
        curves = [
            Line2D([], [], color=self.color(curve), linewidth=2, label=named(curve, of))
            for curve in self.curves
            if curve != ""
        ]
        ink: dict[str, Any] = dict(color=INK, linewidth=1, markersize=5)
        lines: list[tuple[str, str, Any, str]] = [("here", "o", "-", INK)]
        lines += [
            (f"paper: {model}", marker, dashes, "white")
            for model, (marker, dashes) in zip(self.models, MARKERS, strict=False)
        ]
        marks = [
            Line2D(
                [],
                [],
                marker=marker,
                linestyle="" if self.words else dashes,
                markerfacecolor=face,
                label=label,
                **ink,
            )
            for label, marker, dashes, face in lines
        ]
        return [*curves, *marks]


def named(curve: Place, of: str) -> str:
    """A curve's name in the legend."""
    return f"{of}{curve:g}" if isinstance(curve, float) else str(curve)
