"""What the paper says: published values by study, curve and place (`published.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from kangaroo.evaluation.study.points import Place, labelled, place
from kangaroo.evaluation.study.study import StudyConfig

FILE = Path(__file__).with_name("published.yaml")
PAPER = "Liu et al., NeurIPS 2024, arXiv 2404.18911"


@dataclass(frozen=True)
class Published:
    """A published point.

    Args:
        model: the target that it was measured on.
        source: where in the paper it is from.
        values: by metric.
    """

    model: str
    source: str
    curve: Place
    x: Place
    values: dict[str, float]


def published(study: StudyConfig) -> list[Published]:
    """The published points of a study, its curves and methods called as the study calls them."""
    found = []
    for table in yaml.safe_load(FILE.read_text(encoding="utf-8")).get(study.name, []):
        for curve, along in table["points"].items():
            for x, numbers in along.items():
                pairs = zip(table["metrics"], numbers, strict=True)
                values = {metric: number for metric, number in pairs if number is not None}
                at = labelled(study, place(curve)), labelled(study, place(x))
                found.append(Published(table["model"], table["source"], *at, values))
    return found
