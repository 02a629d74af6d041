"""A study's table and files, `NAME.json`, `NAME.md` and `NAME.png`, and its place on a page.

A page, such as `docs/results/paper.md`, has a pair of comments for each study, `<!-- study: NAME
-->` and `<!-- end -->`, and one for what they say together, `<!-- summary -->`. What stands between
is written here; all else is the page's own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from kangaroo.evaluation import comparison
from kangaroo.evaluation.comparison import assigned, circumstances, listed
from kangaroo.evaluation.metrics import Estimate
from kangaroo.evaluation.records import write_json
from kangaroo.evaluation.study import plots
from kangaroo.evaluation.study.study import (
    AGREES,
    DISAGREES,
    HERE,
    OPEN,
    Checked,
    Study,
    fixed,
    heading_of,
    in_order,
    word,
)
from kangaroo.utils import tables
from kangaroo.utils.folders import command_line
from kangaroo.utils.tables import Row, number

PAPER = "Liu et al., NeurIPS 2024, arXiv 2404.18911"
STUDY = re.compile(r"(<!-- study: (\w+) -->\n).*?(<!-- end -->)", re.S)
SUMMARY = re.compile(r"(<!-- summary -->\n).*?(<!-- end -->)", re.S)
IMAGES = Path("img/paper")  # from where the page lies


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


def shown(value: Estimate | None, interval: bool = True) -> str:
    """A value, with its interval."""
    if value is None:
        return number(None)
    return tables.estimate(value.value, value.ends if interval else None)


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
    plots.plot(study).savefig(folder / f"{name}.png", dpi=120)


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
        *([tables.markdown(claim_rows(study.checked))] if study.checked else []),
        *([listed(reasons)] if reasons else []),
        *([study.config.note.strip()] if study.config.note else []),
        "<details><summary>How this was made</summary>\n\n"
        + listed(provenance_lines(study))
        + "\n\n</details>",
    ]
    return "\n\n".join(parts)


def size(study: Study) -> str:
    """What was asked, how it was answered, and how many turns are vanilla's."""
    summaries = [method.summary for method in study.methods]
    first, texts = summaries[0], [summary["lossless"] for summary in summaries]
    compared = [each for each in texts if each["identical"] is not None]
    same, turns = (sum(each[key] for each in compared) for key in ("identical", "turns"))
    sampling = dict.fromkeys(each["settings"]["sampling.temperature"] for each in summaries)
    temperature = ", ".join(map(str, sampling)) if len(sampling) > 1 else next(iter(sampling))
    settings = first["settings"] | {"sampling.temperature": temperature}
    asked = {"turns": texts[0]["turns"], "settings": settings, "methods": []}
    return (
        f"{first['model']} on {first['bench']}: {comparison.size(first | asked)} Texts that are "
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
    """Write what was measured into a page: each study, its plot beside the page, and the summary
    of all of them.

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
    """Which findings of the paper the studies found again."""
    if not studies:
        return "Nothing was measured yet."
    counts, first = Counter(each["verdict"] for x in studies for each in x["checked"]), studies[0]
    return (
        f"{first['model']}, {first['dtype']} on {first['device']}: of {counts.total()} findings of "
        f"the paper that were checked, {counts[AGREES]} agree, {counts[DISAGREES]} disagree, and "
        f"{counts[OPEN]} are open."
    )
