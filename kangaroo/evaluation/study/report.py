"""A study's table, plot and files, `NAME.json`, `NAME.md` and `NAME.png`, and its place on a page.

A page, such as `docs/results/paper.md`, has a pair of comments for each study, `<!-- study: NAME
-->` and `<!-- end -->`, and one for what they say together, `<!-- summary -->`. What stands between
is written here; all else is the page's own.
"""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.table import Table

from kangaroo.evaluation import comparison
from kangaroo.evaluation.comparison import assigned, circumstances, listed
from kangaroo.evaluation.metrics import CTAR, Estimate
from kangaroo.evaluation.plots import FAINT, HF, INK
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.study.study import AGREES, DISAGREES, HERE, OPEN, Place, Study, fixed
from kangaroo.utils import tables
from kangaroo.utils.folders import command_line, write_json
from kangaroo.utils.tables import Row, number, short

PAPER = "Liu et al., NeurIPS 2024, arXiv 2404.18911"
STUDY = re.compile(r"(<!-- study: (\w+) -->\n).*?(<!-- end -->)", re.S)
SUMMARY = re.compile(r"(<!-- summary -->\n).*?(<!-- end -->)", re.S)
IMAGES = Path("img/paper")  # from where the page lies
COLORS = ["#d9772b", "#3b6fb6", "#54a24b", "#7a5195", "#b79a20", "#72b7b2", "#9d755d", "#c65b9b"]
HEADINGS = {"compression_rate": "CR", "acceptance_rate": "accepted", CTAR: "CTAR(w)"}
NAMES = {"mt_bench": "MT-bench", "qa": "QA", "math_reasoning": "math", "rag": "RAG"}  # of tasks


def in_order(places: Iterable[Place]) -> list[Place]:
    """Each once: words as they come, then numbers by size."""
    return sorted(dict.fromkeys(places), key=lambda x: x if isinstance(x, float) else -math.inf)


def word(kind: str | None, x: Place) -> str:
    """A place or a curve of this `StudyConfig.x` or `curve` as a cell."""
    if isinstance(x, float):
        return short(x) if kind == "parameters" else f"{x:g}"
    return "-" if x is None else NAMES.get(x, x)


def heading_of(metric: str) -> str:
    """A metric as a heading."""
    position = metric.removeprefix(CTAR)
    return f"CTAR({position})" if position.isdecimal() else HEADINGS.get(metric, metric)


def table(study: Study, intervals: bool = True) -> list[Row]:
    """A row for each curve, ours and below it those of the paper; the places are columns."""
    points, config = [*study.points, *study.published], study.config
    names, places = list(study.points[0].values), in_order(point.x for point in points)
    values = {(point.curve, point.model, point.x): point.values for point in points}
    rows = []
    for curve in in_order(point.curve for point in points):
        for model in dict.fromkeys(point.model for point in points):
            at_places = {x: values.get((curve, model, x), {}) for x in places}
            if any(at_places.values()):
                row = {config.curve_label: word(config.curve, curve)} if config.curve else {}
                row[" / ".join(map(heading_of, names))] = model
                for x, of_place in at_places.items():
                    cells = [shown(of_place.get(name), intervals) for name in names]
                    row[word(config.x, x)] = " / ".join(cells) if any(of_place.values()) else "-"
                rows.append(row)
    return rows


def claim_rows(study: Study) -> list[Row]:
    """A row for each finding of the paper that was checked."""
    return [
        {
            "finding of the paper": claim.says,
            "metric": heading_of(claim.metric),
            HERE: f"{number(more.value)}, {number(less.value)}",
            "difference": shown(difference),
            "verdict": f"**{verdict}**",
        }
        for claim, more, less, difference, verdict in study.checked
    ]


def shown(value: Estimate | None, interval: bool = True) -> str:
    """A value, with its interval."""
    middle, ends = value or (None, None)
    return tables.estimate(middle, ends if interval else None)


def write(study: Study, folder: Path) -> None:
    """The study's files."""
    name, first = study.config.name, study.methods[0].summary
    result = {
        "study": asdict(study.config),
        **{key: first[key] for key in ("model", "bench", "dtype", "device", "questions")},
        "points": [point._asdict() for point in study.points],
        "checked": [{"says": each.claim.says, "verdict": each.verdict} for each in study.checked],
        "table": table(study),
        "provenance": {method.name: method.summary["provenance"] for method in study.methods},
    }
    write_json(folder / f"{name}.json", result)
    text = f"# {study.config.title}\n\n{body(study)}\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    plot(study).savefig(folder / f"{name}.png", dpi=120)


def plot(study: Study) -> Figure:
    """All points, ours with intervals. Places are one apart; a value without one is a level."""
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
    for (metric, model), axes in zip(product(metrics, models), panels.flat, strict=True):
        of_panel = [(p, x) for p in points if p.model == model and (x := p.values.get(metric))]
        if not of_panel:
            axes.set_axis_off()
            continue
        axes.set_title(f"{heading_of(metric)}, {model}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.tick_params(labelsize=8)
        if metric == "speedup":
            axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        for i, (curve, color) in enumerate(colors.items()):
            values = {point.x: value for point, value in of_panel if point.curve == curve}
            _draw(axes, places, values, color, (i + 0.5) / len(colors) - 0.5)
        axes.set_xticks(range(len(names)), names)
        axes.tick_params("x", rotation=30 if len("".join(names)) > 30 else 0)
    for axes in panels[-1]:
        axes.set_xlabel(config.x.rpartition(".")[2].replace("_", " "), fontsize=8)
    handles = []
    for curve in (curve for curve in curves if curve != ""):
        label = word(config.curve, curve)
        label = f"{config.curve_label} {label}" if isinstance(curve, float) else label
        handles.append(Line2D([], [], color=colors[curve], linewidth=2, label=label))
    if handles:
        figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=5)
    return figure


def _draw(
    axes: Axes, places: list[float | str], values: dict[Place, Estimate], color: str, shift: float
) -> None:
    """A curve of one panel with its intervals. Words are not joined, and shifted by curve."""
    if level := values.pop(None, None):
        axes.axhline(level.value, color=color)
    estimates = [values[place] for place in places if place in values]
    joined = all(isinstance(x, float) for x in places)
    x = [i + (0 if joined else 0.8 * shift) for i, place in enumerate(places) if place in values]
    y = np.array([v.value for v in estimates])
    low, high = np.array([v.ends or [v.value, v.value] for v in estimates]).reshape(-1, 2).T
    errors = np.maximum([y - low, high - y], 0)  # a bootstrap's interval may lie beside its value
    axes.errorbar(x, y, errors, marker="o", ms=4.5, ls="-" if joined else "", color=color)


def terminal_table(study: Study) -> Table:
    """What was measured, without the paper's values, for a rich console of 80 columns."""
    rows = table(study._replace(published=[]), intervals=False)
    return tables.terminal(rows, study.config.title, size(study))


def body(study: Study) -> str:
    """The study as Markdown, without a title."""
    reasons = [
        f"*{result.claim.says}* ({result.verdict}): {result.claim.why.strip()}"
        for result in study.checked
        if result.verdict != AGREES and result.claim.why
    ]
    parts = [
        size(study),
        tables.markdown(table(study)),
        f"![{study.config.title}]({study.config.name}.png)",
        tables.markdown(claim_rows(study)) if study.checked else "",
        listed(reasons),
        study.config.note.strip(),
        "<details><summary>How this was made</summary>",
        listed(provenance_lines(study)),
        "</details>",
    ]
    return "\n\n".join(filter(None, parts))


def size(study: Study) -> str:
    """What was asked, how it was answered, and how many turns are vanilla's."""
    summaries = [method.summary for method in study.methods]
    first, texts = summaries[0], [summary["lossless"] for summary in summaries]
    compared = [each for each in texts if each["identical"] is not None]
    same, turns = (sum(each[key] for each in compared) for key in ("identical", "turns"))
    sampling = dict.fromkeys(each["settings"]["sampling.temperature"] for each in summaries)
    temperature = ", ".join(map(str, sampling)) if len(sampling) > 1 else next(iter(sampling))
    settings = first["settings"] | {"sampling.temperature": temperature}
    about = {"turns": texts[0]["turns"], "settings": settings, "methods": []}
    return (
        f"{first['model']} on {first['bench']}: {comparison.size(first | about)} Texts that are "
        f"vanilla's: {same} of {turns}. Intervals are at 95%; columns are by `{study.config.x}`."
    )


def provenance_lines(study: Study) -> list[str]:
    """Commands, revisions, versions, hardware, settings and the source of published values."""
    runs = [method.summary["provenance"] for method in study.methods]
    lines = [f"`{run['command']}`" for run in runs]
    lines += [f"git {run['git_revision']}" for run in runs]
    lines += [line for run in runs for line in circumstances(run)]
    lines.append(assigned(fixed(study.config, study.methods[0].summary)))
    lines += [f"{point.model}: {PAPER}, {point.source}" for point in study.published]
    return list(dict.fromkeys(lines))


def rewrite(page: Path, results: Path) -> None:
    """Write what is in `results`, a model's folder of studies, into a page, with its plots."""
    text = page.read_text(encoding="utf-8")
    files = {}
    for _, name, _ in STUDY.findall(text):
        # in whichever folder its answers are
        if file := next(iter(sorted(results.glob(f"*/{name}.json"))), None):
            files[name] = file
            (page.parent / IMAGES).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.with_suffix(".png"), page.parent / IMAGES / f"{name}.png")
    text = STUDY.sub(lambda m: f"{m[1]}\n{section(m[2], files.get(m[2]))}\n\n{m[3]}", text)
    studies = [json.loads(file.read_text(encoding="utf-8")) for file in files.values()]
    text = SUMMARY.sub(lambda m: f"{m[1]}\n{summary(studies)}\n\n{m[2]}", text)
    page.write_text(text, encoding="utf-8")


def section(name: str, file: Path | None) -> str:
    """A study's part of the page."""
    if file is None:
        return f"Not measured yet: `{command_line('evaluate', experiment=f'paper/{name}')}`."
    _, text = file.with_suffix(".md").read_text(encoding="utf-8").split("\n\n", 1)
    return text.replace(f"]({name}.png)", f"]({(IMAGES / name).as_posix()}.png)").rstrip()


def summary(studies: Sequence[dict[str, Any]]) -> str:
    """Which findings of the paper the studies found again."""
    if not studies:
        return "Nothing was measured yet."
    counts, first = Counter(each["verdict"] for x in studies for each in x["checked"]), studies[0]
    return (
        f"{first['model']}, {first['dtype']} on {first['device']}: of {counts.total()} findings of "
        f"the paper that were checked, {counts[AGREES]} agree, {counts[DISAGREES]} disagree, and "
        f"{counts[OPEN]} are open."
    )
