"""A study with all that is known of it: its points, the paper's, and what became of its claims."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kangaroo.evaluation.study import claims
from kangaroo.evaluation.study.claims import Checked
from kangaroo.evaluation.study.points import Measured, Point, measured, points
from kangaroo.evaluation.study.published import Published, published
from kangaroo.evaluation.study.study import StudyConfig


@dataclass(frozen=True)
class Study:
    """What was measured, in the order of the plot, and what it is compared with."""

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
