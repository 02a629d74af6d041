"""A study: which results of one evaluation, or of a sweep's, make a table and a plot; its points,
the paper's (`published.yaml`), and which findings of the paper are found again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from kangaroo.evaluation.comparison import summaries_in
from kangaroo.evaluation.metrics import CTAR, Estimate, difference, estimate, has, pairs, value_of
from kangaroo.evaluation.records import Baseline, Record, read
from kangaroo.evaluation.summary import shared
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import differences

PUBLISHED = Path(__file__).with_name("published.yaml")
OVERALL = "overall"  # beside the tasks
HERE = "here"  # the model of our points
AGREES, DISAGREES, OPEN = "agrees", "disagrees", "open"
LEAST = 8  # questions; a bootstrap over fewer is too sure

# Along the table and the plot; None is a method that has no such setting.
Place = float | str | None


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
    """What the results of an evaluation, or of a sweep, are put together to.

    Args:
        name: of its files, and of the published values that belong to it.
        x: what the columns are: `method`, `task`, `position` (in the draft), `parameters`, or a
            setting by its name in results, such as `drafter.threshold`.
        curve: what the rows are, in the same words; None where there is but one.
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
    curve_label: str = "method"
    metrics: list[str] = field(default_factory=lambda: ["compression_rate", "speedup"])
    labels: dict[str, str] = field(default_factory=dict)
    note: str = ""
    claims: list[Claim] = field(default_factory=list)

    def label(self, place: Place) -> Place:
        """A word as the study calls it."""
        return self.labels.get(place, place) if isinstance(place, str) else place


@dataclass(frozen=True)
class Measured:
    """A method that has answered all questions, by its folder's name."""

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


class Point(NamedTuple):
    """What was measured at a place of a table."""

    model: str  # `HERE`, or the target of the paper
    source: str  # the name of the method, or where in the paper it is from
    curve: Place  # what its row has in common; empty where there is but one
    x: Place
    values: dict[str, Estimate | None]  # by metric; None where it does not apply


class Checked(NamedTuple):
    """A claim and what a study says of it."""

    claim: Claim
    more: Estimate
    less: Estimate
    difference: Estimate  # of `more` less `less`, with its paired interval
    verdict: str


class Study(NamedTuple):
    """What was measured, and what it is compared with."""

    config: StudyConfig
    methods: list[Measured]
    points: list[Point]
    published: list[Point]
    checked: list[Checked]


def study_of(config: StudyConfig, folder: Path) -> Study | None:
    """That of the results below `folder`; None where there are none yet. Errors: `ConfigError`."""
    methods = measured(config, folder)
    if not methods:
        return None
    points = [point for method in methods for point in points_of(config, method)]
    checked = [check(claim, methods) for claim in config.claims]
    return Study(config, methods, points, published(config), [x for x in checked if x])


def measured(config: StudyConfig, folder: Path) -> list[Measured]:
    """All methods with results below `folder`, in the order of the study's labels."""
    methods = [
        Measured(name, summary, read(place if (place := folder / name).is_dir() else folder))
        for name, summary in summaries_in(folder).items()
        if Path(name).name not in [baseline.value for baseline in Baseline]
    ]
    for method in methods[1:]:
        if difference := differences(*(fixed(config, x.summary) for x in (methods[0], method))):
            raise ConfigError(
                f"'{method.name}' and '{methods[0].name}' in '{folder}' cannot be in one study: "
                f"{difference}. Move one of them elsewhere."
            )
    answers = [record for method in methods for record in method.records]
    needs_vanilla = "speedup" in config.metrics and config.x != "position"
    if needs_vanilla and not all(has(record, "vanilla") for record in answers):
        raise ConfigError("a study of speedups needs vanilla decoding: add it to baselines=.")
    order = {name: i for i, name in enumerate(config.labels)}
    return sorted(methods, key=lambda method: order.get(method.name, len(order)))


def fixed(config: StudyConfig, summary: dict[str, Any]) -> dict[str, Any]:
    """Settings that all methods of a study have in common."""
    return {k: v for k, v in shared(summary).items() if k not in (config.x, config.curve)}


def as_place(value: Any) -> Place:
    """Numbers are floats, so that 6 and 6.0 are one place."""
    return float(value) if isinstance(value, int | float) else value


def points_of(config: StudyConfig, method: Measured) -> list[Point]:
    """A method's points, one for each of its places."""
    names = {name: name for name in config.metrics}
    parts: dict[Place, tuple[list[Record], dict[str, str]]]
    if config.x == "position":
        longest = max(1, len(method.summary["overall"]["ctar"]))
        parts = {float(w): (method.records, {CTAR: f"{CTAR}{w}"}) for w in range(1, longest + 1)}
    elif config.x == "task":
        tasks = dict.fromkeys([*(record.task for record in method.records), OVERALL])
        parts = {task: (of_task(method.records, task), names) for task in tasks}
    else:
        parts = {config.label(method.place(config.x)): (method.records, names)}
    curve = curve_of(config, method)
    return [
        Point(HERE, method.name, curve, x, {k: value_of(m, records) for k, m in of.items()})
        for x, (records, of) in parts.items()
    ]


def curve_of(config: StudyConfig, method: Measured) -> Place:
    """What a method's row has in common, or its name; of a sweep's several drafters theirs too."""
    has_place = config.x in ("task", "position") or method.place(config.x) is not None
    common = "" if config.curve is None else method.place(config.curve)
    if common is None or (common == "" and not has_place):
        return config.label(method.name)
    job, _, drafter = method.name.rpartition("/")
    curve = config.label(common)
    return f"{curve}, {config.label(drafter)}" if job and config.curve != "method" else curve


def of_task(records: Sequence[Record], task: str | None) -> list[Record]:
    """None is all."""
    return [record for record in records if task in (None, OVERALL, record.task)]


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
    """What a study says of a claim; None where it has not measured both methods on its task.
    Errors: `ConfigError` where the two were not asked the same questions."""
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
    more, less = (value_of(claim.metric, records) for records in both)
    if more is None or less is None:
        return None
    # resampled together: what makes a question hard for both does not widen the interval
    values_Q4 = np.hstack([pairs(records, claim.metric) for records in both])
    more_less = estimate(values_Q4, difference)
    return Checked(claim, more, less, more_less, verdict(more_less, len(values_Q4)))


def verdict(difference: Estimate, questions: int) -> str:
    """What the interval of a difference that should be positive says."""
    if questions < LEAST or difference.ends is None:
        return OPEN
    low, high = difference.ends
    return AGREES if low > 0 else DISAGREES if high < 0 else OPEN
