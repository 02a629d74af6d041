"""A study: a table and a plot of the results of one evaluation, or of a sweep, beside the paper's
values (`published.yaml`), and a check of the paper's findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from kangaroo.evaluation.comparison import summaries_in
from kangaroo.evaluation.metrics import CTAR, Estimate, estimate, pairs, value_of
from kangaroo.evaluation.records import Baseline, Record, read
from kangaroo.utils.errors import ConfigError

PUBLISHED = Path(__file__).with_name("published.yaml")
OVERALL = "overall"  # all tasks together
HERE = "here"  # what the model of our own points is called
VERDICTS = AGREES, DISAGREES, OPEN = "agrees", "disagrees", "open"
MIN_QUESTIONS = 8  # with fewer, a bootstrap's intervals are too narrow

# A value of `StudyConfig.x` or `curve`; None for a method that has no such setting.
Place = float | str | None


@dataclass
class Claim:
    """A finding of the paper: a metric is higher for one method than for another.

    Args:
        more, less: the two methods, by the names of their folders.
        metric: as in `StudyConfig.metrics`.
        why: a possible reason why a study does not confirm it.
    """

    says: str  # the finding in words
    more: str
    less: str
    metric: str = "speedup"
    why: str = ""


@dataclass
class StudyConfig:
    """How results of an evaluation, or of a sweep, become a table and a plot.

    Args:
        name: name of its files, and of its published values.
        x: what the columns are: `method`, `task`, `position` (in the draft), `parameters`, or a
            setting by its name in results, such as `drafter.threshold`.
        curve: what the rows are, likewise; None if there is only one.
        metrics: `speedup`, `compression_rate`, `acceptance_rate`, or `ctar1`, `ctar2` ... for
            CTAR(1) and so on; ignored for `x=position`, which shows CTAR.
        labels: names of methods for the reader.
        note: text below the table.
        claims: findings of the paper to check.
    """

    name: str
    title: str  # of the table and the plot
    x: str = "method"
    curve: str | None = None
    curve_label: str = "method"  # what the rows are, for the reader
    metrics: list[str] = field(default_factory=lambda: ["compression_rate", "speedup"])
    labels: dict[str, str] = field(default_factory=dict)
    note: str = ""
    claims: list[Claim] = field(default_factory=list)

    def place(self, value: Any) -> Place:
        """A value of `x` or `curve` by its label; 6 and 6.0 are the same place."""
        if isinstance(value, str):
            return self.labels.get(value, value)
        return float(value) if isinstance(value, int | float) else value


class Measured(NamedTuple):
    """A method that has answered all questions; `name` is its folder's path in the results."""

    name: str
    summary: dict[str, Any]
    records: list[Record]


class Point(NamedTuple):
    """A cell of the table: measured or published values."""

    model: str  # `HERE`, or the paper's target model
    source: str  # the method's name, or the place in the paper
    curve: Place  # the row; empty if there is only one
    x: Place
    values: Mapping[str, Estimate | None]  # by metric; None if it does not apply


class Checked(NamedTuple):
    """A claim with the values of its two methods."""

    claim: Claim
    more: Estimate
    less: Estimate
    difference: Estimate  # `more` less `less`, with its paired interval
    verdict: str
    questions: int

    @property
    def reason(self) -> str:
        """Why the study may not confirm the claim; empty where it does, or where none is known."""
        if self.verdict == AGREES:
            return ""
        if self.questions < MIN_QUESTIONS:
            return f"{self.questions} questions are too few to judge by."
        return self.claim.why.strip()


class Study(NamedTuple):
    """Measured and published points, and the checked claims."""

    config: StudyConfig
    methods: list[Measured]
    points: list[Point]
    published: list[Point]
    checked: list[Checked]


def read_study(config: StudyConfig, folder: Path) -> Study | None:
    """The study of the results below `folder`, in the order of its labels; None if there are none.
    Errors: `ConfigError`; those of `summaries_in`."""
    methods = [
        Measured(name, summary, read(path if (path := folder / name).is_dir() else folder))
        for name, summary in summaries_in(folder, free=(config.x, config.curve)).items()
        if Path(name).name not in [baseline.value for baseline in Baseline]
    ]
    if not methods:
        return None
    has_speedups = "speedup" in config.metrics and config.x != "position"
    if has_speedups and any(x.summary["overall"]["speedup"] is None for x in methods):
        raise ConfigError("a study of speedups needs vanilla decoding: add it to baselines=.")
    order = {name: i for i, name in enumerate(config.labels)}
    methods.sort(key=lambda method: order.get(method.name, len(order)))
    checked = [check(claim, methods) for claim in config.claims]
    return Study(
        config,
        methods,
        points=[point for method in methods for point in measured_points(config, method)],
        published=published_points(config),
        checked=[claim for claim in checked if claim],
    )


def measured_points(config: StudyConfig, method: Measured) -> list[Point]:
    """A method's points, one for each value of `config.x`. Its row is its value of `config.curve`,
    with the drafter's name in a sweep of several; its name if it has no place in a row or column.
    """
    name, summary, records = method
    places = {"method": name, "parameters": summary["drafter_cost"]["parameters"]}
    places |= summary["settings"] | {"task": OVERALL, "position": 1}
    x = config.place(places.get(config.x))
    curve = "" if config.curve is None else config.place(places.get(config.curve))
    job, _, drafter = name.rpartition("/")
    if curve is None or (curve == "" and x is None):
        curve = config.place(name)
    elif job and config.curve != "method":
        curve = f"{curve}, {config.place(drafter)}"

    def point(x: Place, records: Sequence[Record], metrics: Mapping[str, str]) -> Point:
        values = {name: value_of(metric, records) for name, metric in metrics.items()}
        return Point(HERE, method.name, curve=curve, x=x, values=values)

    metrics = {name: name for name in config.metrics}
    if config.x == "position":
        longest = max(1, len(summary["overall"]["ctar"]))
        return [point(float(w), records, {CTAR: f"{CTAR}{w}"}) for w in range(1, longest + 1)]
    if config.x == "task":
        tasks = dict.fromkeys([*(record.task for record in records), OVERALL])
        groups = {task: [x for x in records if task in (OVERALL, x.task)] for task in tasks}
        return [point(task, group, metrics) for task, group in groups.items()]
    return [point(x, records, metrics)]


def published_points(config: StudyConfig) -> list[Point]:
    """The paper's points, with the study's labels."""
    points = []
    for table in yaml.safe_load(PUBLISHED.read_text(encoding="utf-8")).get(config.name, []):
        for curve, row in table["points"].items():
            for x, numbers in row.items():
                values = zip(table["metrics"], numbers, strict=True)
                point = Point(
                    table["model"],
                    table["source"],
                    curve=config.place(curve),
                    x=config.place(x),
                    values={metric: Estimate(n) for metric, n in values if n is not None},
                )
                points.append(point)
    return points


def check(claim: Claim, methods: Sequence[Measured]) -> Checked | None:
    """Check a claim; None if its methods were not both measured. Errors: `ConfigError` if the two
    were not asked the same questions."""
    by_name = {method.name: method.records for method in methods}
    if not {claim.more, claim.less} <= by_name.keys():
        return None
    both = by_name[claim.more], by_name[claim.less]
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
    margin = estimate(np.hstack([pairs(records, claim.metric) for records in both]))
    n = len(more_ids)
    return Checked(claim, more, less, margin, verdict(margin, n), n)


def verdict(margin: Estimate, questions: int) -> str:
    """Whether the interval of a difference lies above 0, as claimed."""
    if questions < MIN_QUESTIONS or margin.ends is None:
        return OPEN
    low, high = margin.ends
    return AGREES if low > 0 else DISAGREES if high < 0 else OPEN
