"""The tables of a study: ours beside the paper's, and its claims."""

from __future__ import annotations

from collections.abc import Sequence

from kangaroo.evaluation import comparison, plots
from kangaroo.evaluation.report import listed
from kangaroo.evaluation.study import claims
from kangaroo.evaluation.study.claims import Checked
from kangaroo.evaluation.study.points import Measured, Place, in_order
from kangaroo.evaluation.study.ratios import CTAR, Value
from kangaroo.evaluation.study.results import Study
from kangaroo.utils.tables import Row, number, short, span

HEADINGS = {"compression_rate": "CR", "acceptance_rate": "accepted", CTAR: "CTAR(w)"}
WIDE = ("task", "position")  # these places are columns, since each method has all of them
HERE = "here"


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
    title = " / ".join(heading_of(metric) for metric in metrics)
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
            row[config.x_label or config.x] = along(study, curve, x)
            if config.x == "method":
                row["parameters"] = parameters(own)
            for metric in metrics:
                row[heading_of(metric)] = shown(point.values[metric]) if point else "-"
            row["lossless"] = lossless(own)
            for model, metric in told:
                value = theirs.get((model, curve, x), {}).get(metric)
                row[f"{model}: {heading_of(metric)}"] = number(value)
            rows.append(row)
    return rows


def claim_rows(checked: Sequence[Checked]) -> list[Row]:
    """A row for each finding of the paper."""
    return [
        {
            "finding of the paper": one.claim.says,
            "metric": heading_of(one.claim.metric),
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


def along(study: Study, curve: Place, x: Place) -> str:
    """A place as a cell; without one the method's name, if no other column has it."""
    if study.config.x == "parameters" and isinstance(x, float):
        return short(x)
    return word(x) if study.config.curve or x is not None else word(curve)


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


def heading_of(metric: str) -> str:
    """A metric as a heading."""
    position = metric.removeprefix(CTAR)
    known = f"CTAR({position})" if position.isdecimal() else metric
    return HEADINGS.get(metric, known)
