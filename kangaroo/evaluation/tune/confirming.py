"""Decode with the best settings: what was foreseen, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.early_exit import EarlyExitConfig
from kangaroo.evaluation import records, run
from kangaroo.evaluation.bench import BenchConfig, Question
from kangaroo.evaluation.config import Baseline, EvaluateConfig, MethodSpec
from kangaroo.evaluation.metrics import paired_seconds
from kangaroo.evaluation.statistics import interval, speedup
from kangaroo.evaluation.tune.candidates import Candidate, SearchSpace, Source, chain, parts
from kangaroo.evaluation.tune.player import CostsOf, Player, Score, score, vanilla_seconds
from kangaroo.evaluation.tune.trace import TracedQuestion
from kangaroo.models.target import LM

TODAY = "today"  # what results call the drafter that is in use


@dataclass
class Decoding:
    """How questions are decoded to confirm or to report.

    Args:
        output: folder of all runs.
        bench: where the questions come from.
        model: settings of the target.
    """

    lm: LM
    tokenizer: PreTrainedTokenizerBase
    output: Path
    bench: BenchConfig
    max_new_tokens: int
    resume: bool
    model: dict[str, Any]

    def run(
        self, name: str, drafters: Mapping[str, DrafterConfig], questions: Sequence[Question]
    ) -> dict[str, dict[str, Any]]:
        """The summary of each drafter, all and vanilla decoding taking turns; the artefacts of an
        evaluation are in the folder of this name.

        Errors: those of `kangaroo.evaluation.run.evaluate`.
        """
        folder = self.output / name
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "questions.jsonl"
        file.write_text("".join(json.dumps(asdict(one)) + "\n" for one in questions), "utf-8")
        settings = EvaluateConfig(
            output=str(folder),
            bench=replace(self.bench, path=str(file), url=None, sha256=None),
            max_new_tokens=self.max_new_tokens,
            baselines=[Baseline.vanilla],
            warmup=1,
            resume=self.resume,
        )
        contestants = [
            MethodSpec(
                name,
                config.build(self.lm),
                {"model": self.model, "drafter": config.settings()},
                config.made_by(),
            )
            for name, config in drafters.items()
        ]
        model_name = self.model["name"]
        found = run.evaluate(self.lm, self.tokenizer, contestants, settings, model_name=model_name)
        return dict(zip(drafters, found, strict=True))


@dataclass
class Confirmed:
    """A candidate as it was foreseen and as it decoded, on the same questions.

    Args:
        predicted: None where a trace does not tell.
        measured: the summary of its evaluation.
    """

    name: str
    candidate: Candidate
    predicted: Score | None
    measured: dict[str, Any]

    @property
    def speedup(self) -> float:
        """As measured."""
        return self.measured["overall"]["speedup"]

    @property
    def difference(self) -> float | None:
        """How far the prediction is off, as a share of what was measured."""
        return None if self.predicted is None else self.predicted.speedup / self.speedup - 1


def confirm(
    decoding: Decoding,
    few: Mapping[str, Candidate],
    questions: Sequence[Question],
    traced: Sequence[TracedQuestion],
    player: Player,
    costs: CostsOf,
    count: int,
) -> list[Confirmed]:
    """Decode with these candidates.

    Args:
        questions: those for tuning, and their traces in the same order.
        count: so many of these are decoded.
    """
    places = np.unique(np.linspace(0, len(questions) - 1, count).round().astype(int)).tolist()
    drafters = {name: candidate.config for name, candidate in few.items()}
    measured = decoding.run("confirm", drafters, [questions[place] for place in places])
    own = [traced[place] for place in places]
    vanilla_Q = vanilla_seconds(own, costs)
    confirmed = []
    for name, candidate in few.items():
        predicted = None
        if player.knows(candidate) and (candidate.kind, candidate.source) in costs:
            predicted = score(candidate, player.of(candidate), own, costs, vanilla_Q)
        confirmed.append(Confirmed(name, candidate, predicted, measured[name]))
    return confirmed


def reported(
    decoding: Decoding, today: Confirmed, best: Confirmed, questions: Sequence[Question]
) -> tuple[dict[str, dict[str, Any]], tuple[float, list[float] | None] | None]:
    """The summaries of both on questions that neither was chosen by; today's seconds over the
    best one's, and the interval of this, if there are several. None where the best is today's.
    """
    drafters = {one.name: one.candidate.config for one in (today, best)}
    summaries = decoding.run("report", drafters, questions)
    if len(drafters) == 1:
        return summaries, None
    folder = decoding.output / "report"
    theirs, own = (
        [paired_seconds(record)[1] for record in records.read(folder / one.name)]
        for one in (today, best)
    )
    pairs_Q2 = np.stack([theirs, own], 1)
    return summaries, (speedup(pairs_Q2), interval(pairs_Q2))


def confirmed_by(
    scores: Sequence[Score],
    today: DrafterConfig,
    found: dict[str, Source],
    space: SearchSpace,
    count: int,
) -> dict[str, Candidate]:
    """What is decoded, by name: today's drafter; the best settings of the best drafters; and, since
    the prediction is to be checked, the corners of what was searched with the best chain.

    Args:
        count: of the drafters, so many.
    """
    few = {TODAY: Candidate(today, source_of(today, found))}
    best: dict[str, Candidate] = {}
    for one in scores:
        best.setdefault(one.candidate.kind, one.candidate)
    for candidate in list(best.values())[:count]:
        few[candidate.name] = candidate
    if "kangaroo" in best:
        source = found[best["kangaroo"].source or ""]
        thresholds, steps = sorted(space.thresholds), sorted(space.steps)
        corners = {(thresholds[0], steps[0]), (thresholds[0], steps[-1])}
        for corner in sorted(corners | {(thresholds[-1], steps[-1])}):
            candidate = chain(source, *corner)
            few[candidate.name] = candidate
    return few


def source_of(config: DrafterConfig, found: dict[str, Source]) -> str | None:
    """What a drafter drafts with, where it was traced."""
    chain = parts(config)[-1]
    if isinstance(chain, EarlyExitConfig):
        for name, source in found.items():
            own = source.config
            if (own.adapter, own.vocabulary) == (chain.adapter, chain.vocabulary):
                return name
    return None
