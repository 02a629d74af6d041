"""A study's plot: one x axis, a curve for each method, a panel for each metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kangaroo.evaluation.plots import COLORS, FAINT, HF, INK, NAMES
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.study.study import HERE, Place, Point, StudyConfig, in_order

TITLES = {
    "speedup": "speedup over vanilla decoding",
    "compression_rate": "compression rate",
    "acceptance_rate": "share of draft tokens accepted",
    "ctar": "CTAR(w)",
    "ctar1": "CTAR(1)",
}
# Ours are circles and whole lines; hollow are those of the models in the paper.
MARKERS = [("o", "-"), ("D", "--"), ("s", ":"), ("^", "-.")]


def plot(
    study: StudyConfig, ours: Sequence[Point], theirs: Sequence[Point], subtitle: str
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
    scale = Scale(study, [*ours, *theirs])
    for i, metric in enumerate(metrics):
        title = TITLES.get(metric, metric)
        if apart:
            scale.draw(panels[i, 0], f"{title}, here", metric, ours)
            scale.draw(panels[i, 1], f"{title}, the paper", metric, theirs)
        else:
            scale.draw(panels[0, i], title, metric, [*ours, *theirs])
    handles = scale.legend()
    if len(handles) > 1:
        columns = min(len(handles), 4 if size[0] < 8 else 5)
        place: dict[str, Any] = dict(loc="outside lower center", ncols=columns, frameon=False)
        figure.legend(handles=handles, fontsize=8, **place)
    return figure


class Scale:
    """Where places lie and which colours curves have, the same in all panels of a study."""

    def __init__(self, study: StudyConfig, points: Sequence[Point]):
        self.study = study
        along = in_order(point.x for point in points)
        self.places: list[float | str] = [x for x in along if x is not None]
        # a number among words, such as 0.4 beside `auto`, is one too
        self.by_name = any(isinstance(x, str) for x in self.places)
        self.curves = in_order(point.curve for point in points)
        models = dict.fromkeys([HERE, *(point.model for point in points)])
        self.markers = dict(zip(models, MARKERS, strict=False))

    def at(self, x: float | str, curve: Place) -> float:
        """Along the plot; words are one apart, and the curves beside each other there."""
        if isinstance(x, float) and not self.by_name:
            return x
        beside = self.curves.index(curve) - (len(self.curves) - 1) / 2
        return self.places.index(x) + 0.8 * beside / len(self.curves)

    def draw(self, axes: Axes, title: str, metric: str, points: Sequence[Point]) -> None:
        """One panel."""
        axes.set_title(title, fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8)
        if metric == "speedup":
            axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        for curve in self.curves:
            for model in [*list(self.markers)[1:], HERE]:  # ours lie on top
                of_curve = [p for p in points if (p.model, p.curve) == (model, curve)]
                self.line(axes, metric, model, curve, of_curve)
        self.ticks(axes)

    def line(
        self, axes: Axes, metric: str, model: str, curve: Place, points: Sequence[Point]
    ) -> None:
        """A curve with its intervals; words are not joined, and a value without a place is a
        level.
        """
        values = {point.x: v for point in points if (v := point.values.get(metric))}
        marker, dashes = self.markers[model]
        look: dict[str, Any] = dict(color=self.color(curve), linestyle=dashes, linewidth=1.6)
        if model != HERE:
            look |= dict(linewidth=1, alpha=0.7)
        if None in values:
            axes.axhline(values.pop(None).value, **look)
        if values:
            if model != HERE:
                look |= dict(markerfacecolor="white")
            if self.by_name:
                look |= dict(linestyle="")
            x = [self.at(place, curve) for place in values if place is not None]
            ends = [v.ends or [v.value, v.value] for v in values.values()]
            below = [max(0.0, v.value - e[0]) for v, e in zip(values.values(), ends, strict=True)]
            above = [max(0.0, e[1] - v.value) for v, e in zip(values.values(), ends, strict=True)]
            look |= dict(marker=marker, markersize=4.5, elinewidth=0.8)
            axes.errorbar(x, [v.value for v in values.values()], [below, above], **look)

    def ticks(self, axes: Axes) -> None:
        """The places, and what they are of."""
        if self.by_name:
            names = [f"{x:g}" if isinstance(x, float) else NAMES.get(x, x) for x in self.places]
            turned: dict[str, Any] = dict(rotation=30, ha="right") if len(names) > 3 else {}
            axes.set_xticks(range(len(names)), names, **turned)
            axes.set_xlim(-0.5, len(names) - 0.5)
            return
        axes.set_xlabel(self.study.x_label, fontsize=8)
        if self.study.log_x:
            axes.set_xscale("log")
        elif len(self.places) <= 10:
            axes.set_xticks([x for x in self.places if isinstance(x, float)])

    def color(self, curve: Place) -> str:
        """Of a curve; the noise floor is grey."""
        return HF if curve == AGAIN else COLORS[self.curves.index(curve) % len(COLORS)]

    def legend(self) -> list[Line2D]:
        """What colours and marks stand for."""
        of = f"{self.study.curve_label} " if self.study.curve_label else ""
        handles = [
            Line2D([], [], color=self.color(curve), linewidth=2, label=label)
            for curve in self.curves
            if curve != ""
            for label in [f"{of}{curve:g}" if isinstance(curve, float) else str(curve)]
        ]
        for model, (marker, dashes) in self.markers.items():
            look: dict[str, Any] = dict(marker=marker, color=INK, linewidth=1, markersize=5)
            look |= dict(linestyle="" if self.by_name else dashes)
            look |= dict(label=HERE, markerfacecolor=INK)
            if model != HERE:
                look |= dict(label=f"paper: {model}", markerfacecolor="white")
            handles.append(Line2D([], [], **look))
        return handles
