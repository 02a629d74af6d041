"""A study's tables and files, `NAME.json`, `NAME.md` and `NAME.png`, and its place on a page.

A page, such as `docs/results/paper.md`, has a pair of comments for each study, `<!-- study: NAME
-->` and `<!-- end -->`, and one for what they say together, `<!-- summary -->`. What stands between
is written here; all else is the page's own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from kangaroo.evaluation import comparison
from kangaroo.evaluation.metrics import CTAR
from kangaroo.evaluation.plots import NAMES, about
from kangaroo.evaluation.records import write_json
from kangaroo.evaluation.report import assigned, circumstances, listed
from kangaroo.evaluation.study import plots
from kangaroo.evaluation.study.study import (
    AGREES,
    DISAGREES,
    HERE,
    OPEN,
    Checked,
    Estimate,
    Measured,
    Place,
    Study,
    fixed,
    in_order,
)
from kangaroo.utils import tables
from kangaroo.utils.folders import command_line
from kangaroo.utils.tables import Row, number, short

PAPER = "Liu et al., NeurIPS 2024, arXiv 2404.18911"
HEADINGS = {"compression_rate": "CR", "acceptance_rate": "accepted", CTAR: "CTAR(w)"}
WIDE = ("task", "position")  # these places are columns, since each method has all of them
STUDY = re.compile(r"(<!-- study: (\w+) -->\n).*?(<!-- end -->)", re.S)
SUMMARY = re.compile(r"(<!-- summary -->\n).*?(<!-- end -->)", re.S)
IMAGES = Path("img/paper")  # from where the page lies


# --- tables


def table(study: Study, intervals: bool = True) -> list[Row]:
    """The study's table, ours beside the paper's."""
    return wide(study, intervals) if study.config.x in WIDE else long(study)


def wide(study: Study, intervals: bool) -> list[Row]:
    """A row for each curve, ours and below it those of the paper; the places are columns."""
    metrics = list(study.points[0].values)
    places = in_order(point.x for point in study.points)
    points = [*study.points, *study.published]
    values = {(point.curve, point.model, point.x): point.values for point in points}
    title = " / ".join(map(heading_of, metrics))
    rows = []
    for curve in in_order(point.curve for point in study.points):
        for model in dict.fromkeys(point.model for point in points):
            at_places = {x: values.get((curve, model, x), {}) for x in places}
            if any(at_places.values()):
                columns = {
                    column_of(study, x): " / ".join(shown(v.get(m), intervals) for m in metrics)
                    if any(v.get(m) for m in metrics)
                    else "-"
                    for x, v in at_places.items()
                }
                head = {study.config.curve_label or "method": word(curve), title: model}
                rows.append(head | columns)
    return rows


def long(study: Study) -> list[Row]:
    """A row for each point; the paper's values are columns, and what it alone has is a row."""
    config, rows = study.config, []
    ours = {(point.curve, point.x): point for point in study.points}
    theirs = {(point.model, point.curve, point.x): point.values for point in study.published}
    columns = dict.fromkeys((point.model, m) for point in study.published for m in point.values)
    places = [*ours, *((point.curve, point.x) for point in study.published)]
    methods = {method.name: method for method in study.methods}
    for curve in in_order(curve for curve, _ in places):
        for x in in_order(x for its_curve, x in places if its_curve == curve):
            point = ours.get((curve, x))
            method = methods[point.source] if point else None
            row = {config.curve_label: word(curve)} if config.curve else {}
            row[config.x_label or config.x] = along(study, curve, x)
            if config.x == "method":
                cost = method.summary["drafter_cost"]["parameters"] if method else None
                row["parameters"] = "-" if cost is None else short(cost)
            for metric in study.points[0].values:
                row[heading_of(metric)] = shown(point.values[metric] if point else None)
            row["lossless"] = lossless(method)
            for model, metric in columns:
                value = theirs.get((model, curve, x), {}).get(metric)
                row[f"{model}: {heading_of(metric)}"] = shown(value)
            rows.append(row)
    return rows


def claim_rows(checked: Sequence[Checked]) -> list[Row]:
    """A row for each finding of the paper."""
    return [
        {
            "finding of the paper": result.claim.says,
            "metric": heading_of(result.claim.metric),
            HERE: f"{number(result.more.value)}, {number(result.less.value)}",
            "difference": shown(result.difference),
            "verdict": f"**{result.verdict}**",
        }
        for result in checked
    ]


def lossless(method: Measured | None) -> str:
    """Turns that are vanilla's, of all."""
    if method is None:
        return "-"
    texts = method.summary["lossless"]
    forks = Counter(fork["label"] for fork in texts["forks"])
    return comparison.lossless_cell(texts | {"forks": forks})


def shown(value: Estimate | None, interval: bool = True) -> str:
    """A value, with its interval."""
    if value is None:
        return number(None)
    return tables.estimate(value.value, value.ends if interval else None)


def column_of(study: Study, x: Place) -> str:
    """A place as a column."""
    return f"w = {x:g}" if study.config.x == "position" else NAMES.get(str(x), str(x))


def along(study: Study, curve: Place, x: Place) -> str:
    """A place as a cell; without one the method's name, if no other column has it."""
    if study.config.x == "parameters" and isinstance(x, float):
        return short(x)
    return word(x) if study.config.curve or x is not None else word(curve)


def word(x: Place) -> str:
    """A place as a cell."""
    return "-" if x is None else f"{x:g}" if isinstance(x, float) else x


def heading_of(metric: str) -> str:
    """A metric as a heading."""
    position = metric.removeprefix(CTAR)
    return f"CTAR({position})" if position.isdecimal() else HEADINGS.get(metric, metric)


# --- files


def write(study: Study, folder: Path) -> None:
    """The study's files."""
    name, first = study.config.name, study.methods[0].summary
    result = {
        "study": asdict(study.config),
        **{key: first[key] for key in ("model", "bench", "dtype", "device", "questions")},
        "max_new_tokens": first["settings"]["max_new_tokens"],
        "points": [{"method": point.source} | asdict(point) for point in study.points],
        "published": [asdict(point) for point in study.published],
        "checked": [asdict(result) for result in study.checked],
        "table": table(study),
        "provenance": {method.name: method.summary["provenance"] for method in study.methods},
    }
    write_json(folder / f"{name}.json", result)
    text = f"# {study.config.title}\n\n{body(study, f'{name}.png')}\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    subtitle = about({k: v for k, v in first.items() if k != "drafter"})
    plot = plots.plot(study.config, study.points, study.published, subtitle)
    plot.savefig(folder / f"{name}.png", dpi=120)


def terminal_table(study: Study) -> Table:
    """What was measured, without the paper's values, for a rich console of 80 columns."""
    rows = table(replace(study, published=[]), intervals=False)
    return tables.terminal(rows, study.config.title, size(study))


def body(study: Study, image: str) -> str:
    """The study as Markdown, without a title.

    Args:
        image: where the plot lies, from where the Markdown is read.
    """
    reasons = [
        f"*{result.claim.says}* ({result.verdict}): {result.claim.why.strip()}"
        for result in study.checked
        if result.verdict != AGREES and result.claim.why
    ]
    parts = [
        size(study),
        tables.markdown(table(study)),
        f"![{study.config.title}]({image})",
        *([tables.markdown(claim_rows(study.checked))] if study.checked else []),
        *([listed(reasons)] if reasons else []),
        *([study.config.note.strip()] if study.config.note else []),
        "<details><summary>How this was made</summary>\n\n"
        + listed(provenance_lines(study))
        + "\n\n</details>",
    ]
    return "\n\n".join(parts)


def size(study: Study) -> str:
    """What was asked, and how it was answered."""
    first = study.methods[0].summary
    settings = first["settings"]
    greedy = all(m.summary["settings"]["sampling.temperature"] == 0 for m in study.methods)
    task = f" of the task {settings['task']}" if settings.get("task") else ""
    return (
        f"{first['model']} on {first['bench']}: {first['questions']} questions{task}, "
        f"{first['lossless']['turns']} turns, at most {settings['max_new_tokens']} new tokens, "
        f"{'greedy' if greedy else 'sampled'}, batch 1, {first['dtype']} on {first['device']}. "
        "Intervals are at 95%."
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


# --- the page


def rewrite(page: Path, results: Path) -> None:
    """Write what is known of each study into the page, and its plot beside it.

    Args:
        results: a model's folder, in which `evaluate.py experiment=paper/...` wrote.
    """
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
    """How large the studies were, and which findings of the paper they found again."""
    if not studies:
        return "Nothing was measured yet."
    counts = Counter(result["verdict"] for study in studies for result in study["checked"])
    first = studies[0]
    parts = [
        f"{first['model']}, {first['dtype']} on {first['device']}: each experiment asked "
        f"{ends(study['questions'] for study in studies)} questions of {first['bench']}, with at "
        f"most {ends(study['max_new_tokens'] for study in studies)} new tokens.",
        f"Of {counts.total()} findings of the paper that were checked, {counts[AGREES]} agree, "
        f"{counts[DISAGREES]} disagree, and {counts[OPEN]} are open.",
    ]
    rows = [
        {
            "finding of the paper": result["claim"]["says"],
            "experiment": f"`{study['study']['name']}`",
            "verdict": f"**{result['verdict']}**",
        }
        for study in studies
        for result in study["checked"]
    ]
    return "\n\n".join([*parts, *([tables.markdown(rows)] if rows else [])])


def ends(numbers: Iterable[int]) -> str:
    """A number, or the smallest and the largest of several."""
    values = list(numbers)
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
