"""Whether the paper's findings are found again: two methods against each other, in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kangaroo.evaluation.study.points import OVERALL, Measured, Point, of_task
from kangaroo.evaluation.study.published import Published
from kangaroo.evaluation.study.ratios import Value, difference, pairs, value
from kangaroo.evaluation.study.study import Claim, StudyConfig
from kangaroo.utils.errors import ConfigError

AGREES, DISAGREES, OPEN = "agrees", "disagrees", "open"
LEAST = 8  # questions; a bootstrap over fewer is too sure


@dataclass(frozen=True)
class Checked:
    """A claim and what a study says of it.

    Args:
        more, less: the two values.
        difference: of the first less the second, with its paired interval.
        verdict: agrees or disagrees where the interval leaves no doubt; else, and where there were
            fewer than `LEAST` questions, open.
        published: the paper's two values, of the first model that it gives both for.
    """

    claim: Claim
    more: Value
    less: Value
    difference: Value
    verdict: str
    published: tuple[float, float] | None


def check(
    study: StudyConfig,
    claim: Claim,
    methods: Sequence[Measured],
    points: Sequence[Point],
    published: Sequence[Published],
) -> Checked | None:
    """What a study says of a claim; None where it has not measured both of its methods, or asked
    nothing of its task.

    Errors: `ConfigError` where the two were not asked the same questions.
    """
    by_name = {one.name: of_task(one.records, claim.task) for one in methods}
    if claim.more not in by_name or claim.less not in by_name:
        return None
    both = by_name[claim.more], by_name[claim.less]
    asked = [[record.question_id for record in records] for records in both]
    if asked[0] != asked[1]:
        raise ConfigError(
            f"'{claim.more}' and '{claim.less}' were not asked the same questions, so they cannot "
            "be compared in pairs. Measure them again (resume=false)."
        )
    if not both[0]:
        return None
    more_Q2, less_Q2 = (pairs(records, claim.metric) for records in both)
    more, less = value(more_Q2), value(less_Q2)
    if more is None or less is None:
        return None
    found = difference(more_Q2, less_Q2)

    def told(method: str) -> dict[str, float]:
        """The published values of a method, by model."""
        own = [
            point
            for point in points
            if point.method == method and (study.x != "task" or point.x == (claim.task or OVERALL))
        ]
        # the paper does not say at which place some of its values are
        places = [place for one in own for place in ((one.curve, one.x), (one.curve, None))]
        known = [one for one in published if (one.curve, one.x) in places]
        return {one.model: one.values[claim.metric] for one in known if claim.metric in one.values}

    theirs, others = told(claim.more), told(claim.less)
    models = [model for model in theirs if model in others]
    values = (theirs[models[0]], others[models[0]]) if models else None
    return Checked(claim, more, less, found, verdict(found, len(asked[0])), values)


def verdict(difference: Value, questions: int) -> str:
    """What the interval of a difference that should be positive says."""
    if questions < LEAST or difference.low is None or difference.high is None:
        return OPEN
    return AGREES if difference.low > 0 else DISAGREES if difference.high < 0 else OPEN
