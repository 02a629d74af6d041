"""A study's files: `NAME.json`, `NAME.md` and `NAME.png` beside the results that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from kangaroo import tables
from kangaroo.evaluation import comparison, plots
from kangaroo.evaluation.records import write_json
from kangaroo.evaluation.report import assigned, circumstances, listed
from kangaroo.paper import claims
from kangaroo.paper import plots as paper_plots
from kangaroo.paper.claims import Checked
from kangaroo.paper.points import Measured, Place, Point, fixed, in_order, measured, points
from kangaroo.paper.published import PAPER, Published, published
from kangaroo.paper.ratios import Value
from kangaroo.paper.study import StudyConfig
from kangaroo.tables import Row, number, short, span

HEADINGS = {
    "compression_rate": "CR",
    "acceptance_rate": "accepted",
    "ctar1": "CTAR(1)",
    "ctar": "CTAR(w)",
}
WIDE = ("task", "position")  # these places are columns, since each method has all of them
HERE = "here"


@dataclass(frozen=True)
class Study:
    """A study with all that is known of it."""

    config: StudyConfig
    methods: list[Measured]
    points: list[Point]
    published: list[Published]
    checked: list[Checked]


def study_of(config: StudyConfig, folder: Path) -> Study | None:
    """The study of the results below `folder`; None where there are none yet."""
    methods = measured(config, folder)
    if not methods:
        return None
    ours, theirs = points(config, methods), published(config)
    found = [claims.check(config, claim, methods, ours, theirs) for claim in config.claims]
    checked = [one for one in found if one is not None]
    return Study(config, methods, ours, theirs, checked)


def write(study: Study, folder: Path) -> None:
    """The study's files."""
    name, about = study.config.name, study.methods[0].summary
    found = {
        "study": asdict(study.config),
        **{key: about[key] for key in ("model", "bench", "dtype", "device", "questions")},
        "max_new_tokens": about["settings"]["max_new_tokens"],
        "points": [asdict(point) for point in study.points],
        "published": [asdict(point) for point in study.published],
        "checked": [asdict(one) for one in study.checked],
        "table": table(study),
        "provenance": {one.name: one.summary["provenance"] for one in study.methods},
    }
    write_json(folder / f"{name}.json", found)
    text = f"# {study.config.title}\n\n{body(study, f'{name}.png')}\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    plot = paper_plots.plot(study.config, study.points, study.published, subtitle(study))
    plot.savefig(folder / f"{name}.png", dpi=120)


def terminal_table(study: Study) -> Table:
    """What was measured, without the paper's values, for a rich console of 80 columns."""
    own = replace(study, published=[])
    rows = wide(own, intervals=False) if study.config.x in WIDE else long(own)
    return tables.terminal(rows, study.config.title, size(study))


def body(study: Study, image: str) -> str:
    """The study as Markdown, without a title.

    Args:
        image: where the plot lies, from where the Markdown is read.
    """
    parts = [
        size(study),
        tables.markdown(table(study)),
        f"![{study.config.title}]({image})",
        *([tables.markdown(claim_rows(study.checked))] if study.checked else []),
        *reasons(study.checked),
        *([study.config.note.strip()] if study.config.note else []),
        "<details><summary>How this was made</summary>\n\n"
        + listed(provenance_lines(study))
        + "\n\n</details>",
    ]
    return "\n\n".join(parts)


def subtitle(study: Study) -> str:
    """What the plot is of, in words."""
    about = study.methods[0].summary
    return "{model} on {bench}, {dtype}, {device}".format(**about)


def size(study: Study) -> str:
    """What was asked, and how it was answered."""
    about = study.methods[0].summary
    settings = about["settings"]
    greedy = all(one.summary["settings"]["sampling.temperature"] == 0 for one in study.methods)
    task = f" of the task {settings['task']}" if settings.get("task") else ""
    return (
        f"{about['model']} on {about['bench']}: {about['questions']} questions{task}, "
        f"{about['lossless']['turns']} turns, at most {settings['max_new_tokens']} new tokens, "
        f"{'greedy' if greedy else 'sampled'}, batch 1, {about['dtype']} on {about['device']}. "
        "Intervals are at 95%."
    )


def table(study: Study) -> list[Row]:
    """The study's table, ours beside the paper's."""
    return wide(study) if study.config.x in WIDE else long(study)


def wide(study: Study, intervals: bool = True) -> list[Row]:
    """A row for each curve, ours and below it those of the paper; the places are columns."""
    cell = shown if intervals else plain
    models = list(dict.fromkeys(one.model for one in study.published))
    metrics = list(study.points[0].values)
    places = in_order(point.x for point in study.points)
    ours = {(point.curve, point.x): point.values for point in study.points}
    theirs = {(one.model, one.curve, one.x): one.values for one in study.published}
    title = " / ".join(HEADINGS.get(metric, metric) for metric in metrics)
    rows = []
    for curve in in_order(point.curve for point in study.points):
        head = {study.config.curve_label or "method": word(curve)}
        cells = {
            heading(study, x): joined([cell(ours[curve, x][m]) for m in metrics])
            if (curve, x) in ours
            else "-"
            for x in places
        }
        rows.append(head | {title: HERE} | cells)
        for model in models:
            known = {x: theirs.get((model, curve, x)) for x in places}
            if any(known.values()):
                told = {
                    heading(study, x): joined([number((v or {}).get(m)) for m in metrics])
                    for x, v in known.items()
                }
                rows.append(head | {title: model} | told)
    return rows


def long(study: Study) -> list[Row]:
    """A row for each point; the paper's values are columns, and what it alone has is a row."""
    config, rows = study.config, []
    metrics = list(study.points[0].values)
    ours = {(point.curve, point.x): point for point in study.points}
    theirs = {(one.model, one.curve, one.x): one.values for one in study.published}
    told = list(dict.fromkeys((one.model, m) for one in study.published for m in one.values))
    keys = [*ours, *((one.curve, one.x) for one in study.published)]
    by_name = {one.name: one for one in study.methods}
    for curve in in_order(key[0] for key in keys):
        for x in in_order(key[1] for key in keys if key[0] == curve):
            point = ours.get((curve, x))
            own = by_name[point.method] if point else None
            row = {config.curve_label: word(curve)} if config.curve else {}
            at = short(x) if config.x == "parameters" and isinstance(x, float) else word(x)
            row[config.x_label or config.x] = at
            if config.x == "method":
                row["parameters"] = parameters(own)
            for metric in metrics:
                row[HEADINGS.get(metric, metric)] = shown(point.values[metric]) if point else "-"
            row["lossless"] = lossless(own)
            for model, metric in told:
                value = theirs.get((model, curve, x), {}).get(metric)
                row[f"{model}: {HEADINGS.get(metric, metric)}"] = number(value)
            rows.append(row)
    return rows


def claim_rows(checked: Sequence[Checked]) -> list[Row]:
    """A row for each finding of the paper."""
    return [
        {
            "finding of the paper": one.claim.says,
            "metric": HEADINGS.get(one.claim.metric, one.claim.metric),
            "the paper": " > ".join(map(number, one.published)) if one.published else "-",
            HERE: f"{number(one.more.value)}, {number(one.less.value)}",
            "difference": shown(one.difference, " to "),
            "verdict": f"**{one.verdict}**",
        }
        for one in checked
    ]


def reasons(checked: Sequence[Checked]) -> list[str]:
    """Why a finding may not be found here, for each that is not."""
    lines = [
        f"*{one.claim.says}* ({one.verdict}): {one.claim.why.strip()}"
        for one in checked
        if one.verdict != claims.AGREES and one.claim.why
    ]
    return [listed(lines)] if lines else []


def parameters(one: Measured | None) -> str:
    """What a method has beyond the target."""
    return "-" if one is None else short(one.summary["drafter_cost"]["parameters"])


def lossless(one: Measured | None) -> str:
    """Turns that are vanilla's, of all."""
    if one is None:
        return "-"
    told = one.summary["lossless"]
    labels = [fork["label"] for fork in told["forks"]]
    return comparison.lossless(told | {"forks": {x: labels.count(x) for x in labels}})


def heading(study: Study, x: Place) -> str:
    """A place as a column."""
    return f"w = {x:g}" if study.config.x == "position" else plots.NAMES.get(str(x), str(x))


def word(x: Place) -> str:
    """A place as a cell."""
    return "-" if x is None else f"{x:g}" if isinstance(x, float) else x


def plain(value: Value | None) -> str:
    """A value alone."""
    return number(value.value if value else None)


def shown(value: Value | None, between: str = "-") -> str:
    """A value with its interval."""
    if value is None or value.low is None or value.high is None:
        return plain(value)
    return f"{plain(value)} ({span([value.low, value.high], between)})"


def joined(cells: Sequence[str]) -> str:
    """Several metrics in one cell; a dash for none at all."""
    return "-" if set(cells) == {"-"} else " / ".join(cells)


def provenance_lines(study: Study) -> list[str]:
    """Commands, revisions, versions, hardware, settings and the source of published values."""
    about = [one.summary["provenance"] for one in study.methods]
    lines = [f"`{one['command']}`" for one in about]
    lines += [f"git {one['git_revision']}" for one in about]
    lines += [line for one in about for line in circumstances(one)]
    lines.append(assigned(fixed(study.config, study.methods[0].summary)))
    lines += [f"{one.model}: {PAPER}, {one.source}" for one in study.published]
    return list(dict.fromkeys(lines))
