"""The learning curves as a table, a plot and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kangaroo.evaluation.plots import FAINT, INK, NAMES
from kangaroo.learning_curve.fit import Law, fit
from kangaroo.learning_curve.measuring import MEASURES, LearningCurveConfig, Result
from kangaroo.utils import tables
from kangaroo.utils.provenance import made_by, provenance

NAME = "learning_curve"
COLORS = ["#d9772b", "#3b6fb6", "#54a24b", "#7a5195", "#8a8f98"]
TITLES = {"agreement": "agreement", "ctar1": "CTAR(1)", "compression_rate": "compression rate"}
SHOWN = MEASURES[:2]  # that are shares, and have a law


def write(results: Sequence[Result], config: LearningCurveConfig, subtitle: str) -> str:
    """`learning_curve.md`, `.png` and `.json` in the output folder. Returns the page."""
    folder, laws = Path(config.output), laws_of(results)
    folder.mkdir(parents=True, exist_ok=True)
    page = f"{markdown(results, laws, config.ahead)}\n{made_by()}\n"
    (folder / f"{NAME}.md").write_text(page, encoding="utf-8")
    draw(results, laws, config.ahead, subtitle).savefig(folder / f"{NAME}.png", dpi=150)
    found: dict[str, Any] = {
        "settings": asdict(config),
        "results": [asdict(one) for one in results],
        "laws": {
            curve: {measure: law and asdict(law) for measure, law in own.items()}
            for curve, own in laws.items()
        },
    }
    told = json.dumps(found | provenance(), indent=2, default=str)
    (folder / f"{NAME}.json").write_text(told + "\n", encoding="utf-8")
    return page


def curves(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each curve, by rising text."""
    return {curve: list(own) for curve, own in groupby(results, lambda one: one.reader.curve)}


def laws_of(results: Sequence[Result]) -> dict[str, dict[str, Law | None]]:
    """By curve and measure."""
    return {
        curve: {
            measure: fit([one.reader.tokens for one in own], [one.values[measure] for one in own])
            for measure in SHOWN
        }
        for curve, own in curves(results).items()
    }


def markdown(
    results: Sequence[Result], laws: dict[str, dict[str, Law | None]], ahead: float
) -> str:
    """A row for each adapter, CTAR(1) by task, and what the laws foretell."""
    rows, by_task = [], []
    for one in results:
        who = {"adapter": one.reader.curve, "M tokens": tables.number(one.reader.tokens / 1e6)}
        rows.append(who | {"epochs": str(one.reader.epochs)} | cells(one))
        tasks = {
            NAMES.get(task, task): tables.number(own["ctar1"], 3) for task, own in one.tasks.items()
        }
        by_task.append(who | tasks)
    told = [line for curve, own in laws.items() for line in foretold(curve, own, results, ahead)]
    parts = [tables.markdown(rows), "CTAR(1) by task:", tables.markdown(by_task)]
    return "\n\n".join([*parts, *(["\n".join(told)] if told else [])]) + "\n"


def cells(one: Result) -> tables.Row:
    """A measure's value with its interval."""
    made = {}
    for measure in MEASURES:
        digits = 2 if measure == "compression_rate" else 3
        ends = "-".join(tables.number(end, digits) for end in one.intervals[measure] or ())
        value = tables.number(one.values[measure], digits)
        made[TITLES[measure]] = f"{value} ({ends})" if ends else value
    return made


def foretold(
    curve: str, laws: dict[str, Law | None], results: Sequence[Result], ahead: float
) -> list[str]:
    """What the laws of a curve say of more text, in words."""
    own = curves(results)[curve]
    most, lines = own[-1].reader.tokens, []
    for measure, law in laws.items():
        if law is None:
            continue
        now, then = own[-1].values[measure], law.at(most * ahead)
        formula = f"{law.ceiling:.3f} - {law.scale:.3f} N^-{law.power:.2f}"
        lines.append(
            f"- {curve}, {TITLES[measure]}: {formula} with N million tokens, {law.error:.3f} from "
            f"the points. {ahead:g} times the most text would bring {then:.3f}, not {now:.3f}."
        )
    return lines


def draw(
    results: Sequence[Result],
    laws: dict[str, dict[str, Law | None]],
    ahead: float,
    subtitle: str,
) -> Figure:
    """Agreement and CTAR(1) over tokens: dots with intervals, dashed the law."""
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    figure.suptitle(f"What more text brings: {subtitle}", fontsize=10, x=0.01, ha="left")
    for axes, measure in zip(figure.subplots(1, len(SHOWN)), SHOWN, strict=True):
        _panel(axes, TITLES[measure])
        for color, (curve, own) in zip(_colors(), curves(results).items(), strict=False):
            tokens = np.array([one.reader.tokens for one in own], float)
            values = np.array([one.values[measure] for one in own])
            ends = np.array([one.intervals[measure] or [one.values[measure]] * 2 for one in own]).T
            law = laws[curve][measure]
            axes.errorbar(
                tokens,
                values,
                yerr=np.abs(ends - values),
                fmt="o" if law else "o-",
                color=color,
                ms=5,
                lw=1.2,
                capsize=2,
                label=curve,
            )
            if law:
                x = np.geomspace(tokens[0], tokens[-1] * ahead, 100)
                axes.plot(x, [law.at(n) for n in x], "--", color=color, lw=1.1)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def _colors() -> list[str]:
    return COLORS * 4


def _panel(axes: Axes, heading: str) -> None:
    axes.set_title(heading, fontsize=10, loc="left", color=INK)
    axes.set_xscale("log")
    axes.set_xlabel("different tokens of the assistant", fontsize=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1e6:g} M"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
