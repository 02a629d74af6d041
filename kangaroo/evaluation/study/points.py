"""From the results of an evaluation to the points of a study's curves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kangaroo.evaluation.comparison import shared
from kangaroo.evaluation.records import SUMMARY, Record, read
from kangaroo.evaluation.study.ratios import CTAR, Value, pairs, value
from kangaroo.evaluation.study.study import StudyConfig
from kangaroo.evaluation.summary import BASELINES
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import changes

OVERALL = "overall"  # beside the tasks

Place = float | str | None  # along the plot; None is a method that has no such setting


@dataclass(frozen=True)
class Measured:
    """A method of a study that has answered all questions.

    Args:
        name: its folder in the study's, by which claims and labels know it.
    """

    name: str
    summary: dict[str, Any]
    records: list[Record]


@dataclass(frozen=True)
class Point:
    """A method at a place of a plot.

    Args:
        method: the name of the method.
        curve: what its curve has in common; empty where there is but one.
        values: by metric; None where it does not apply.
    """

    method: str
    curve: Place
    x: Place
    values: dict[str, Value | None]


def measured(study: StudyConfig, folder: Path) -> list[Measured]:
    """All methods with results below `folder`, in the order of the study's labels, then by name.

    Errors: `ConfigError` where they were not asked the same in the same way.
    """
    names = [file.parent for file in sorted(folder.rglob(SUMMARY))]
    found = [
        Measured(
            place.relative_to(folder).as_posix(),
            json.loads((place / SUMMARY).read_text(encoding="utf-8")),
            read(place),
        )
        for place in names
        if place.name not in BASELINES.values()
    ]
    for one in found[1:]:
        first, other = (fixed(study, x.summary) for x in (found[0], one))
        if difference := changes(first, other):
            raise ConfigError(
                f"'{one.name}' and '{found[0].name}' in '{folder}' cannot be in one study: "
                f"{difference}. Move one of them elsewhere."
            )
    order = list(study.labels)
    return sorted(found, key=lambda x: order.index(x.name) if x.name in order else len(order))


def fixed(study: StudyConfig, summary: dict[str, Any]) -> dict[str, Any]:
    """Settings that all methods of a study have in common."""
    return {k: v for k, v in shared(summary).items() if k not in (study.x, study.curve)}


def points(study: StudyConfig, methods: Sequence[Measured]) -> list[Point]:
    """All points, curve by curve along x."""
    found = [point for one in methods for point in points_of(study, one)]
    curves = in_order([point.curve for point in found])
    along = in_order([point.x for point in found])
    return sorted(found, key=lambda point: (curves.index(point.curve), along.index(point.x)))


def in_order(places: Iterable[Place]) -> list[Place]:
    """Each once: words as they come, then numbers by size."""
    each = list(dict.fromkeys(places))
    numbers = sorted(x for x in each if isinstance(x, float))
    return [*(x for x in each if not isinstance(x, float)), *numbers]


def points_of(study: StudyConfig, one: Measured) -> list[Point]:
    """A method's points: one, or where it has several places one for each."""
    curve = curve_of(study, one)

    def point(x: Place, records: Sequence[Record], metrics: dict[str, str]) -> Point:
        values = {name: value(pairs(records, metric)) for name, metric in metrics.items()}
        return Point(one.name, curve, x, values)

    metrics = {name: name for name in study.metrics}
    if study.x == "position":
        longest = max(1, len(one.summary["overall"]["ctar"]))
        return [point(float(w), one.records, {CTAR: f"{CTAR}{w}"}) for w in range(1, longest + 1)]
    if study.x == "task":
        tasks = dict.fromkeys(record.task for record in one.records)
        parts = {task: of_task(one.records, task) for task in [*tasks, OVERALL]}
        return [point(task, some, metrics) for task, some in parts.items()]
    return [point(labelled(study, where(study.x, one)), one.records, metrics)]


def curve_of(study: StudyConfig, one: Measured) -> Place:
    """What a method's curve has in common; of one without such a setting, or without a place along
    the plot, its name. Where the jobs of a sweep measured several drafters, theirs too.
    """
    known = "" if study.curve is None else where(study.curve, one)
    if known is None or (known == "" and not has_places(study, one)):
        return labelled(study, one.name)
    job, _, drafter = one.name.rpartition("/")
    curve = labelled(study, known)
    return f"{curve}, {labelled(study, drafter)}" if job and study.curve != "method" else curve


def has_places(study: StudyConfig, one: Measured) -> bool:
    """Whether the study's x says where the method belongs."""
    return study.x in ("task", "position") or where(study.x, one) is not None


def of_task(records: Sequence[Record], task: str | None) -> list[Record]:
    """The records of a task; None is all."""
    return [record for record in records if task in (None, OVERALL, record.task)]


def where(name: str, one: Measured) -> Place:
    """What `StudyConfig.x` and `curve` name, for a method: a number, a word, or None."""
    if name == "method":
        return one.name
    if name == "parameters":
        return float(one.summary["drafter_cost"]["parameters"])
    return place(one.summary["settings"].get(name))


def place(value: Any) -> Place:
    """Numbers are floats, so that 6 and 6.0 are one place."""
    return float(value) if isinstance(value, int | float) else value


def labelled(study: StudyConfig, x: Place) -> Place:
    """A word as the study calls it."""
    return study.labels.get(x, x) if isinstance(x, str) else x
