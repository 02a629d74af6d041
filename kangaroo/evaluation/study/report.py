"""A study's table, plot and files, `NAME.json`, `NAME.md` and `NAME.png`, and its part of a page.

A page, such as `docs/results/paper.md`, has pairs of comments, `<!-- study: NAME -->` or
`<!-- summary -->` and `<!-- end -->`. `publish` replaces only the text between them.
"""

import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from rich.table import Table

from kangaroo.evaluation import comparison
from kangaroo.evaluation.comparison import bullet_list, environment_lines, settings_line
from kangaroo.evaluation.metrics import CTAR, Estimate
from kangaroo.evaluation.plots import FAINT, HF, INK
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.study.study import HERE, OVERALL, VERDICTS, Claim, Place, Study
from kangaroo.evaluation.summary import shared_settings
from kangaroo.utils import tables
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import write_json
from kangaroo.utils.tables import Row, number, short

PAPER = "Liu et al., NeurIPS 2024, arXiv 2404.18911"
STUDY = re.compile(r"(<!-- study: (\w+) -->\n)(.*?)(<!-- end -->)", re.S)
SUMMARY = re.compile(r"(<!-- summary -->\n).*?(<!-- end -->)", re.S)
VERDICT = re.compile(rf"\| \*\*({'|'.join(VERDICTS)})\*\* \|")  # of a row
IMAGES = Path("img/paper")  # relative to the page
COLORS = ["#d9772b", "#3b6fb6", "#54a24b", "#7a5195", "#b79a20", "#72b7b2", "#9d755d", "#c65b9b"]
HEADINGS = {"compression_rate": "CR", "acceptance_rate": "accepted", CTAR: "CTAR(w)"}
TASKS = {"mt_bench": "MT-bench", "qa": "QA", "math_reasoning": "math", "rag": "RAG"}


def sorted_places(places: Iterable[Place]) -> list[Place]:
    """Places without duplicates: first words, in their order, then numbers by size."""
    return sorted(dict.fromkeys(places), key=lambda x: x if isinstance(x, float) else -math.inf)


def place_name(kind: str | None, place: Place) -> str:
    """The text of a place; `kind` is the study's `x` or `curve`."""
    if isinstance(place, float):
        return short(place) if kind == "parameters" else f"{place:g}"
    return "-" if place is None else TASKS.get(place, place).replace("_", " ")


def metric_heading(metric: str) -> str:
    """The heading of a metric."""
    position = metric.removeprefix(CTAR)
    return f"CTAR({position})" if position.isdecimal() else HEADINGS.get(metric, metric)


def table(study: Study, intervals: bool = True) -> list[Row]:
    """A row for each curve and, below ours, for the paper's; a column for each place."""
    points = [*study.points, *study.published]
    config = study.config
    metrics = list(study.points[0].values)
    places = sorted_places(point.x for point in points)
    values = {(point.curve, point.model, point.x): point.values for point in points}
    rows = []
    curves = sorted_places(point.curve for point in points)
    for curve, model in product(curves, dict.fromkeys(point.model for point in points)):
        cells = {x: values.get((curve, model, x), {}) for x in places}
        if any(cells.values()):
            row = {config.curve_label: place_name(config.curve, curve)} if config.curve else {}
            row[" / ".join(map(metric_heading, metrics))] = model
            for x, cell in cells.items():
                texts = [estimate_text(cell.get(metric), intervals) for metric in metrics]
                row[place_name(config.x, x)] = " / ".join(texts) if any(cell.values()) else "-"
            rows.append(row)
    return rows


def claim_rows(study: Study) -> list[Row]:
    """A row for each checked claim."""
    return [
        {
            "finding of the paper": result.claim.says,
            "metric": metric_heading(result.claim.metric),
            "the paper": published_values(study, result.claim),
            HERE: f"{number(result.more.value)}, {number(result.less.value)}",
            "difference": estimate_text(result.difference),
            "verdict": f"**{result.verdict}**",
        }
        for result in study.checked
    ]


def published_values(study: Study, claim: Claim) -> str:
    """The paper's two values, of the first model that it gives both for; "-" without any. A value
    that it gives for no `x` stands for all of its row."""
    of_tasks = study.config.x == "task"
    cells = {p.source: (p.curve, p.x) for p in study.points if p.x == OVERALL or not of_tasks}
    for model in dict.fromkeys(point.model for point in study.published):
        points = [point for point in study.published if point.model == model]
        values = {(p.curve, p.x): p.values.get(claim.metric) for p in points}
        places = [cells[name] for name in (claim.more, claim.less)]
        more, less = (values.get((row, x), values.get((row, None))) for row, x in places)
        if more and less:
            return f"{number(more.value)} > {number(less.value)}"
    return "-"


def estimate_text(estimate: Estimate | None, interval: bool = True) -> str:
    """An estimate as text, with its interval or without."""
    value, ends = estimate or (None, None)
    return tables.estimate(value, ends if interval else None)


def write(study: Study, folder: Path) -> None:
    """Write the study's files."""
    name = study.config.name
    first = study.methods[0].summary
    result = {
        "study": asdict(study.config),
        **{key: first[key] for key in ("model", "bench", "dtype", "device", "questions")},
        "points": [point._asdict() for point in study.points],
        "checked": [{"says": x.claim.says, "verdict": x.verdict} for x in study.checked],
        "table": table(study),
        "provenance": {method.name: method.summary["provenance"] for method in study.methods},
    }
    write_json(folder / f"{name}.json", result)
    text = f"# {study.config.title}\n\n{body(study)}\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    plot(study).savefig(folder / f"{name}.png", dpi=120)


def plot(study: Study) -> Figure:
    """All points, ours with intervals; a value without a place is a horizontal line."""
    points = [*study.points, *study.published]
    config = study.config
    metrics = list(study.points[0].values)
    models = list(dict.fromkeys(p.model for p in points))
    places = [x for x in sorted_places(point.x for point in points) if x is not None]
    names = [place_name(config.x, x) for x in places]
    curves = sorted_places(point.curve for point in points)
    size = max(6.4, 4.1 * len(models)), 1.3 + 2.6 * len(metrics)
    figure = Figure(figsize=size, layout="constrained")
    subtitle = "{model} on {bench}, {dtype}, {device}".format(**study.methods[0].summary)
    figure.suptitle(f"{config.title}: {subtitle}", fontsize=10, x=0.01, ha="left")
    panels = figure.subplots(len(metrics), len(models), squeeze=False, sharex=True, sharey="row")
    for (metric, model), axes in zip(product(metrics, models), panels.flat, strict=True):
        shown = [(p, x) for p in points if p.model == model and (x := p.values.get(metric))]
        if not shown:
            axes.set_axis_off()
            continue
        axes.set_title(f"{metric_heading(metric)}, {model}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=FAINT, linewidth=0.8)
        axes.tick_params(labelsize=8)
        if metric == "speedup":
            axes.axhline(1, color=INK, linewidth=1, linestyle=":")
        for i, curve in enumerate(curves):
            values = {point.x: value for point, value in shown if point.curve == curve}
            color = HF if curve == AGAIN else COLORS[i % len(COLORS)]
            name = place_name(config.curve, curve)
            bars = _draw(axes, places, values, color=color, shift=(i + 0.5) / len(curves) - 0.5)
            bars.set_label(f"{config.curve_label} {name}" if isinstance(curve, float) else name)
        axes.set_xticks(range(len(names)), names)
        axes.tick_params("x", rotation=30 if len("".join(names)) > 30 else 0)
    for axes in panels[-1]:
        axes.set_xlabel(config.x.rpartition(".")[2].replace("_", " "), fontsize=8)
    if curves != [""]:
        handles, labels = panels[0, 0].get_legend_handles_labels()  # ours has all metrics
        columns = 4 if max(map(len, labels)) < 25 else 2  # so that they fit
        figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=columns)
    return figure


def _draw(
    axes: Axes, places: list[float | str], values: dict[Place, Estimate], color: str, shift: float
) -> ErrorbarContainer:
    """Draw a curve with its intervals. Words as places are not joined, and are shifted by curve."""
    if level := values.pop(None, None):
        axes.axhline(level.value, color=color)
    estimates = [values[place] for place in places if place in values]
    joined = all(isinstance(x, float) for x in places)
    x = [i + (0 if joined else 0.8 * shift) for i, place in enumerate(places) if place in values]
    y = np.array([v.value for v in estimates])
    low, high = np.array([v.ends or [v.value, v.value] for v in estimates]).reshape(-1, 2).T
    errors = np.maximum([y - low, high - y], 0)  # a bootstrap's interval may lie beside its value
    return axes.errorbar(x, y, errors, marker="o", ms=4.5, ls="-" if joined else "", color=color)


def terminal_table(study: Study) -> Table:
    """The measured values without intervals, for a rich console of 80 columns."""
    rows = table(study._replace(published=[]), intervals=False)
    return tables.terminal(rows, study.config.title, size(study))


def body(study: Study) -> str:
    """The study as Markdown, without a title."""
    reasons = [f"*{x.claim.says}* ({x.verdict}): {x.reason}" for x in study.checked if x.reason]
    parts = [
        size(study),
        tables.markdown(table(study)),
        f"![{study.config.title}]({study.config.name}.png)",
        tables.markdown(claim_rows(study)) if study.checked else "",
        bullet_list(reasons),
        study.config.note.strip(),
        "<details><summary>How this was made</summary>",
        bullet_list(provenance_lines(study)),
        "</details>",
    ]
    return "\n\n".join(filter(None, parts))


def size(study: Study) -> str:
    """How much was asked under which settings, and how many texts are equal to vanilla's."""
    summaries = [method.summary for method in study.methods]
    first = summaries[0]
    lossless = [summary["lossless"] for summary in summaries]
    compared = [x for x in lossless if x["identical"] is not None]
    equal, turns = (sum(x[key] for x in compared) for key in ("identical", "turns"))
    temperatures = list(dict.fromkeys(x["settings"]["sampling.temperature"] for x in summaries))
    temperature = ", ".join(map(str, temperatures)) if len(temperatures) > 1 else temperatures[0]
    settings = first["settings"] | {"sampling.temperature": temperature}
    questions = first | {"turns": lossless[0]["turns"], "settings": settings, "methods": []}
    return (
        f"{first['model']} on {first['bench']}: {comparison.size(questions)} Texts that are "
        f"vanilla's: {equal} of {turns}. Intervals are at 95%; columns are by `{study.config.x}`."
    )


def provenance_lines(study: Study) -> list[str]:
    """Commands, revisions, versions, hardware, settings and sources of published values."""
    provenances = [method.summary["provenance"] for method in study.methods]
    lines = [f"`{provenance['command']}`" for provenance in provenances]
    lines += [f"git {provenance['git_revision']}" for provenance in provenances]
    lines += [line for provenance in provenances for line in environment_lines(provenance)]
    places = (study.config.x, study.config.curve)
    lines.append(settings_line(shared_settings(study.methods[0].summary, free=places)))
    lines += [f"{point.model}: {PAPER}, {point.source}" for point in study.published]
    return list(dict.fromkeys(lines))


def publish(results: Path, page: Path) -> None:
    """Write the studies in `results`, a model's folder, into a page that has a place for each, and
    copy their plots. Other studies of the page stay as they are. Errors: `ConfigError`."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    if not STUDY.search(text):
        raise ConfigError(
            f"page={page} has no place for a study, and results={results} no comparison.json. "
            "Write `<!-- study: NAME -->` and `<!-- end -->` into the page, or pass the output= of "
            "a comparison."
        )

    def replaced(match: re.Match[str]) -> str:
        start, name, old, end = match.groups()
        return f"{start}\n{section(name, results, page) or old.strip()}\n\n{end}"

    text = STUDY.sub(replaced, text)
    verdicts = Counter(VERDICT.findall("".join(match[0] for match in STUDY.finditer(text))))
    agree, disagree, undecided = (verdicts[verdict] for verdict in VERDICTS)
    counted = (
        f"Of {verdicts.total()} findings of the paper that were checked, {agree} agree, "
        f"{disagree} disagree, and {undecided} are open."
    )
    page.write_text(SUMMARY.sub(rf"\1\n{counted}\n\n\2", text), encoding="utf-8")


def section(name: str, results: Path, page: Path) -> str:
    """A study's part of the page, whose plot is copied beside it; empty if it is not measured."""
    # a study may share the folder of another one
    file = next(iter(sorted(results.glob(f"*/{name}.md"))), None)
    if file is None:
        return ""
    (page.parent / IMAGES).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file.with_suffix(".png"), page.parent / IMAGES / f"{name}.png")
    _, text = file.read_text(encoding="utf-8").split("\n\n", 1)
    return text.replace(f"]({name}.png)", f"]({(IMAGES / name).as_posix()}.png)").rstrip()
