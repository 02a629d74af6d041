"""What a comparison comes to, in two sentences: the winner, and what of it may be cited."""

from __future__ import annotations

from typing import Any

from kangaroo.evaluation import report
from kangaroo.evaluation.records import AGAIN
from kangaroo.evaluation.summary import BASELINES
from kangaroo.utils.provenance import machine


def sentences(comparison: dict[str, Any]) -> list[str]:
    """Of what `comparison.compare` returns; none where only baselines were measured."""
    drafters = [m for m in comparison["methods"] if m["name"] not in (*BASELINES.values(), AGAIN)]
    if not drafters:
        return []
    fastest = drafters[0]
    return [*winner(comparison, fastest), citation(comparison, fastest)]


def winner(comparison: dict[str, Any], fastest: dict[str, Any]) -> list[str]:
    """Which drafter is the fastest, and from which other methods it does not differ; nothing where
    vanilla did not run.

    Args:
        fastest: of the drafters.
    """
    if fastest["overall"]["speedup"] is None:
        return []
    name = fastest["name"]
    limits = {"vanilla": fastest["overall"]["speedup_ci95"]}
    for pair in comparison["paired"]:
        ends = pair["speed_ratio_ci95"]
        if pair["row"] == name and pair["column"] != AGAIN:
            limits[pair["column"]] = ends
        elif pair["column"] == name and pair["row"] != AGAIN:
            limits[pair["row"]] = ends and [1 / end for end in reversed(ends)]
    if None in limits.values():
        return [f"{name} was the fastest drafter; a single question does not show which is."]
    alike = [other for other, (low, high) in limits.items() if low <= 1 <= high]
    faster = [other for other, (_, high) in limits.items() if high < 1]
    differs = f"does not differ from {', '.join(alike)}" if alike else "differs from all others"
    beaten = f", but {', '.join(faster)} is faster" if faster else ""
    return [f"{name} is the fastest drafter and, on these questions, {differs}{beaten}."]


def citation(comparison: dict[str, Any], method: dict[str, Any]) -> str:
    """A result with all that it holds for."""
    overall, about = method["overall"], method["provenance"]
    result = f"writes {overall['tokens_per_second']:.1f} tokens/s"
    if overall["speedup"] is not None:
        times = f"{overall['speedup']:.2f} times as fast as vanilla decoding"
        result = f"is {times}{report.within(overall['speedup_ci95'])}"
    asked = comparison | {"questions": overall["questions"], "lossless": method["lossless"]}
    revision = about["git_revision"] or f"version {about['versions'].get('kangaroo')}"
    return (
        f"To cite: {method['name']} {result} with {comparison['model']} on {comparison['bench']} "
        f"({report.asked(asked).rstrip('.')}; {machine(about)}; Kangaroo {revision})."
    )
