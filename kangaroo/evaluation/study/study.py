"""A study: which results of one evaluation, or of a sweep's, make a table and a plot; its points,
the paper's (`published.yaml`), and which findings of the paper are found again.

Shapes: Q questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kangaroo.evaluation import statistics
from kangaroo.evaluation.comparison import shared, summaries_in
from kangaroo.evaluation.metrics import CTAR, pairs
from kangaroo.evaluation.plots import NAMES
from kangaroo.evaluation.records import BASELINES, Record, read
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import changes
from kangaroo.utils.tables import short

PUBLISHED = Path(__file__).with_name("published.yaml")
OVERALL = "overall"  # beside the tasks
HERE = "here"  # the model of our points
AGREES, DISAGREES, OPEN = "agrees", "disagrees", "open"
LEAST = 8  # questions; a bootstrap over fewer is too sure

Place = float | str | None  # along the plot; None is a method that has no such setting


@dataclass
class Claim:
    """A finding of the paper: one method has more of a metric than another.

    Args:
        more, less: the two methods, by the names of their folders.
        metric, task: as in `StudyConfig.metrics`; on the questions of this task, None is all.
        why: what may explain that a study does not find it.
    """

    says: str
    more: str
    less: str
    metric: str = "speedup"
    task: str | None = None
    why: str = ""


@dataclass
class StudyConfig:
    """What the results of an evaluation, or of the jobs of a sweep, are put together to.

    Args:
        name: of its files, and of the published values that belong to it.
        x: what changes along the plot: `method`, `task`, `position` (in the draft), `parameters`,
            or a setting by its name in results, such as `drafter.threshold`.
        curve: what each curve has in common, in the same words; None where there is but one.
        metrics: `speedup`, `compression_rate`, `acceptance_rate`, or `ctar1`, `ctar2` ... for
            CTAR(1) and so on; not read for `x=position`, which has CTAR.
        labels: what methods are called in words.
        note: what a reader of the table has to know.
        claims: findings of the paper to be checked.
    """

    name: str
    title: str
    x: str = "method"
    curve: str | None = None
    x_label: str = ""
    curve_label: str = ""
    metrics: list[str] = field(default_factory=lambda: ["compression_rate", "speedup"])
    labels: dict[str, str] = field(default_factory=dict)
    note: str = ""
    claims: list[Claim] = field(default_factory=list)

    def label(self, place: Place) -> Place:
        """A word as the study calls it."""
        return self.labels.get(place, place) if isinstance(place, str) else place


@dataclass(frozen=True)
class Measured:
    """A method that has answered all questions; claims and labels know it by its folder's name."""

    name: str
    summary: dict[str, Any]
    records: list[Record]

    def place(self, name: str) -> Place:
        """What `StudyConfig.x` or `curve` names, for this method: a number, a word, or None."""
        if name == "method":
            return self.name
        if name == "parameters":
            return float(self.summary["drafter_cost"]["parameters"])
        return as_place(self.summary["settings"].get(name))


@dataclass(frozen=True)
class Estimate:
    """A ratio; `low` and `high` are the ends of its 95% interval, None for a single question and
    for published values.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> list[float] | None:
        """The interval."""
        return None if self.low is None or self.high is None else [self.low, self.high]


@dataclass(frozen=True)
class Point:
    """What was measured at a place of a plot, here or in the paper.

    Args:
        model: `HERE`, or the target of the paper.
        source: the name of the method, or where in the paper it is from.
        curve: what its curve has in common; empty where there is but one.
        values: by metric; None where it does not apply.
    """

    model: str
    source: str
    curve: Place
    x: Place
    values: dict[str, Estimate | None]


@dataclass(frozen=True)
class Checked:
    """A claim and what a study says of it.

    Args:
        difference: of `more` less `less`, with its paired interval.
        verdict: agrees or disagrees where the interval leaves no doubt; else, and where there were
            fewer than `LEAST` questions, open.
    """

    claim: Claim
    more: Estimate
    less: Estimate
    difference: Estimate
    verdict: str


@dataclass(frozen=True)
class Study:
    """What was measured, in the order of the plot, and what it is compared with."""

    config: StudyConfig
    methods: list[Measured]
    points: list[Point]
    published: list[Point]
    checked: list[Checked]

    def word(self, x: Place) -> str:
        """A place, or a curve, in a table or along a plot."""
        if isinstance(x, float):
            prefix = "w = " if self.config.x == "position" else ""
            return short(x) if self.config.x == "parameters" else f"{prefix}{x:g}"
        return "-" if x is None else NAMES.get(x, x)


def study_of(config: StudyConfig, folder: Path) -> Study | None:
    """The study of the results below `folder`; None where there are none yet.

    Errors: `ConfigError` where methods were not asked the same in the same way.
    """
    methods = measured(config, folder)
    if not methods:
        return None
    points = [point for method in methods for point in points_of(config, method)]
    curves, along = (
        in_order(places) for places in zip(*((p.curve, p.x) for p in points), strict=True)
    )
    points.sort(key=lambda point: (curves.index(point.curve), along.index(point.x)))
    checked = [check(claim, methods) for claim in config.claims]
    return Study(config, methods, points, published(config), [x for x in checked if x])


def measured(config: StudyConfig, folder: Path) -> list[Measured]:
    """All methods with results below `folder`, in the order of the study's labels, then by name."""
    methods = [
        Measured(name, summary, read(place if (place := folder / name).is_dir() else folder))
        for name, summary in summaries_in(folder).items()
        if Path(name).name not in BASELINES.values()
    ]
    for method in methods[1:]:
        if difference := changes(*(fixed(config, x.summary) for x in (methods[0], method))):
            raise ConfigError(
                f"'{method.name}' and '{methods[0].name}' in '{folder}' cannot be in one study: "
                f"{difference}. Move one of them elsewhere."
            )
    order = list(config.labels)
    return sorted(methods, key=lambda x: order.index(x.name) if x.name in order else len(order))


def fixed(config: StudyConfig, summary: dict[str, Any]) -> dict[str, Any]:
    """Settings that all methods of a study have in common."""
    return {k: v for k, v in shared(summary).items() if k not in (config.x, config.curve)}


def in_order(places: Iterable[Place]) -> list[Place]:
    """Each once: words as they come, then numbers by size."""
    each = list(dict.fromkeys(places))
    numbers = sorted(x for x in each if isinstance(x, float))
    return [*(x for x in each if not isinstance(x, float)), *numbers]


def as_place(value: Any) -> Place:
    """Numbers are floats, so that 6 and 6.0 are one place."""
    return float(value) if isinstance(value, int | float) else value


def points_of(config: StudyConfig, method: Measured) -> list[Point]:
    """A method's points, one for each of its places."""
    metrics = {name: name for name in config.metrics}
    parts: dict[Place, tuple[list[Record], dict[str, str]]]
    if config.x == "position":
        longest = max(1, len(method.summary["overall"]["ctar"]))
        parts = {float(w): (method.records, {CTAR: f"{CTAR}{w}"}) for w in range(1, longest + 1)}
    elif config.x == "task":
        tasks = dict.fromkeys([*(record.task for record in method.records), OVERALL])
        parts = {task: (of_task(method.records, task), metrics) for task in tasks}
    else:
        parts = {config.label(method.place(config.x)): (method.records, metrics)}
    curve = curve_of(config, method)
    return [
        Point(HERE, method.name, curve, x, {k: value_of(records, m) for k, m in names.items()})
        for x, (records, names) in parts.items()
    ]


def curve_of(config: StudyConfig, method: Measured) -> Place:
    """What a method's curve has in common; of one without such a setting, or without a place along
    the plot, its name. Where the jobs of a sweep measured several drafters, theirs too.
    """
    has_place = config.x in ("task", "position") or method.place(config.x) is not None
    common = "" if config.curve is None else method.place(config.curve)
    if common is None or (common == "" and not has_place):
        return config.label(method.name)
    job, _, drafter = method.name.rpartition("/")
    curve = config.label(common)
    return f"{curve}, {config.label(drafter)}" if job and config.curve != "method" else curve


def of_task(records: Sequence[Record], task: str | None) -> list[Record]:
    """The records of a task; None is all."""
    return [record for record in records if task in (None, OVERALL, record.task)]


def estimate(
    totals_QK: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = statistics.ratio
) -> Estimate:
    """A statistic of totals over questions, with its interval."""
    value = float(statistic(totals_QK.sum(0)))
    return Estimate(value, *statistics.interval(totals_QK, statistic) or ())


def value_of(records: Sequence[Record], metric: str) -> Estimate | None:
    """A metric over some questions; None where there is nothing to divide by."""
    pairs_Q2 = pairs(records, metric)
    return estimate(pairs_Q2) if pairs_Q2[:, 1].sum() else None


def published(config: StudyConfig) -> list[Point]:
    """The published points of a study, its curves and methods called as the study calls them."""
    points = []
    for table in yaml.safe_load(PUBLISHED.read_text(encoding="utf-8")).get(config.name, []):
        for curve, along in table["points"].items():
            for x, numbers in along.items():
                values = zip(table["metrics"], numbers, strict=True)
                estimates: dict[str, Estimate | None]
                estimates = {metric: Estimate(n) for metric, n in values if n is not None}
                place = config.label(as_place(curve)), config.label(as_place(x))
                points.append(Point(table["model"], table["source"], *place, estimates))
    return points


def check(claim: Claim, methods: Sequence[Measured]) -> Checked | None:
    """What a study says of a claim; None where it has not measured both of its methods, or asked
    nothing of its task.

    Errors: `ConfigError` where the two were not asked the same questions.
    """
    by_name = {method.name: of_task(method.records, claim.task) for method in methods}
    both = [by_name[name] for name in (claim.more, claim.less) if name in by_name]
    if len(both) < 2 or not any(both):
        return None
    more_ids, less_ids = ([record.question_id for record in records] for records in both)
    if more_ids != less_ids:
        raise ConfigError(
            f"'{claim.more}' and '{claim.less}' were not asked the same questions, so they cannot "
            "be compared in pairs. Measure them again (resume=false)."
        )
    more, less = (value_of(records, claim.metric) for records in both)
    if more is None or less is None:
        return None
    # resampled together: what makes a question hard for both does not widen the interval
    values_Q4 = np.hstack([pairs(records, claim.metric) for records in both])
    difference = estimate(values_Q4, statistics.difference)
    return Checked(claim, more, less, difference, verdict(difference, len(values_Q4)))


def verdict(difference: Estimate, questions: int) -> str:
    """What the interval of a difference that should be positive says."""
    if questions < LEAST or difference.low is None or difference.high is None:
        return OPEN
    return AGREES if difference.low > 0 else DISAGREES if difference.high < 0 else OPEN
