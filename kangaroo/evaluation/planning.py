"""Before a run: how wide the interval of the speedup will be, and how many questions it takes.

The width falls with the root of the number of questions. What else it depends on is the *spread*:
how much the speedup differs from question to question, as a share of it. An earlier run tells that.

Shapes: Q questions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kangaroo.evaluation.records import SUMMARY
from kangaroo.evaluation.speedup import speedup

# SmolLM2-135M on Spec-Bench, 24 questions: 0.11 with kangaroo, 0.33 with hybrid.
ASSUMED = 0.3
FEWEST = 8  # questions that tell a spread
DEVIATIONS = 2 * 1.96  # standard deviations between the ends of a 95% interval


@dataclass(frozen=True)
class Spread:
    """How much the speedup differs from question to question, as a share of it.

    Args:
        source: where that is known from, in words.
    """

    value: float
    source: str

    def width(self, questions: int) -> float:
        """Of the 95% interval, from end to end, as a share of the speedup."""
        return DEVIATIONS * self.value / math.sqrt(questions)

    def questions(self, width: float) -> int:
        """How many an interval of at most this width takes."""
        return max(1, math.ceil((DEVIATIONS * self.value / width) ** 2))


def told(name: str, spread: Spread, questions: int, wanted: float) -> str:
    """What to expect, in a sentence."""
    takes = f"interval_width={wanted} takes {spread.questions(wanted)} questions ({spread.source})"
    if questions == 1:
        return f"{name}, 1 question: the speedup of one has no interval; {takes}"
    return (
        f"{name}, {questions} questions: expect a 95% interval of the speedup that is "
        f"{spread.width(questions):.0%} of it wide; {takes}"
    )


def spread_of(by_question: Sequence[dict[str, Any]]) -> float | None:
    """The standard deviation over questions of what each adds to the ratio of totals, as a share of
    that (the delta method); None where too few questions tell it, or vanilla did not run.
    """
    pairs = [(q["vanilla_paired_seconds"], q["paired_seconds"]) for q in by_question]
    if len(pairs) < FEWEST or None in pairs[0]:
        return None
    pairs_Q2 = np.array(pairs)
    vanilla_Q, method_Q = pairs_Q2.T
    return float((vanilla_Q - speedup(pairs_Q2) * method_Q).std(ddof=1) / vanilla_Q.mean())


def known_spread(folder: str | None, model: str, drafter: str) -> Spread:
    """From the newest finished run of that model and drafter below a folder, else assumed."""
    summaries = [] if folder is None else Path(folder).rglob(SUMMARY)
    for file in sorted(summaries, key=lambda file: file.stat().st_mtime, reverse=True):
        found = json.loads(file.read_text(encoding="utf-8"))
        if (found["model"], found["drafter"]) == (model, drafter):
            value = spread_of(found.get("by_question", []))
            if value is not None:
                return Spread(value, f"by the spread of {value:.2f} in {file.parent}")
    return Spread(ASSUMED, f"a spread of {ASSUMED} is assumed: no earlier run tells it")
