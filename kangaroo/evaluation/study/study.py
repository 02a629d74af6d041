"""A study: which results of one evaluation, or of a sweep's, make a table and a plot."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Claim:
    """A finding of the paper: one method has more of a metric than another.

    Args:
        says: the finding in words.
        more, less: the two methods, by the names of their folders in the study's.
        metric: as in `StudyConfig.metrics`.
        task: on the questions of this task; None is all.
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
        title: of its table and its plot.
        x: what changes along the plot: `method`, `task`, `position` (in the draft), `parameters`,
            or a setting by its name in results, such as `drafter.threshold`.
        curve: what each curve has in common, in the same words; None where there is but one.
        x_label, curve_label: what the page calls them.
        metrics: `speedup`, `compression_rate`, `acceptance_rate`, or `ctar1`, `ctar2` ... for
            CTAR(1) and so on; not read for `x=position`, which has CTAR.
        log_x: a logarithmic axis.
        labels: what methods are called in words, by the names of their folders.
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
    log_x: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    note: str = ""
    claims: list[Claim] = field(default_factory=list)
