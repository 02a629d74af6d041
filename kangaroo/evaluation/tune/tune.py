"""Tune a model's drafter: trace, measure, search by replay, confirm by decoding, report.

Read it top to bottom. Questions that something is chosen by, and questions that the result is
reported on, are never the same.

Shapes: Q questions.
"""

from __future__ import annotations

import json
import logging
import platform
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.cpu.native import build_name
from kangaroo.drafters.base import DrafterConfig
from kangaroo.evaluation.bench import BenchConfig, Question, load_questions
from kangaroo.evaluation.tune import costs, trace
from kangaroo.evaluation.tune.bench import trace_bench
from kangaroo.evaluation.tune.candidates import SearchSpace, Source, candidates, sources
from kangaroo.evaluation.tune.confirming import Confirmed, Decoding, confirm, confirmed_by, reported
from kangaroo.evaluation.tune.measuring import measure
from kangaroo.evaluation.tune.player import CostsOf, Player, Score, score, vanilla_seconds
from kangaroo.evaluation.tune.recording import Recorder
from kangaroo.evaluation.tune.trace import TracedQuestion
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, Ranged, Seed

log = logging.getLogger(__name__)


@dataclass
class TuneConfig(Ranged):
    """What is searched, and on which questions.

    Args:
        output: folder of everything; a run that was stopped goes on from there.
        seed: of the split into questions for tuning and for reporting.
        tuning_questions, reporting_questions: so many of each, spread over the bench's tasks.
        max_new_tokens: of a turn.
        measure_turns, measure_tokens: that are decoded by each drafter to time its rounds.
        confirm: of the drafters, the best settings of so many are decoded.
        confirm_questions: of those for tuning, so many.
        resume: false forgets what `output` holds.
    """

    output: str
    bench: BenchConfig = field(default_factory=BenchConfig)
    search: SearchSpace = field(default_factory=SearchSpace)
    seed: Seed = 0
    tuning_questions: Count = 18
    reporting_questions: Count = 24
    max_new_tokens: Count = 64
    measure_turns: Count = 3
    measure_tokens: Count = 40
    confirm: Count = 3
    confirm_questions: Count = 10
    resume: bool = True


@dataclass
class Tuned:
    """All that a tuning found out.

    Args:
        sources: what was drafted with.
        scores: of all candidates, the fastest first.
        exact: of the turns that were decoded to be timed, how many have the replayed rounds.
        confirmed: the first is today's drafter.
        best: of those confirmed.
        report: summaries of today's and the best drafter on questions that nothing was chosen by.
        gain: today's seconds over the best one's on these, and the 95% interval; None where they
            are one.
    """

    split: Split
    sources: dict[str, Source]
    costs: CostsOf
    exact: tuple[int, int]
    scores: list[Score]
    confirmed: list[Confirmed]
    best: Confirmed
    report: dict[str, dict[str, Any]]
    gain: tuple[float, list[float] | None] | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class Split:
    """Questions that settings are chosen by, and others that the choice is reported on."""

    tuning: list[Question]
    reporting: list[Question]


def tune(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    today: DrafterConfig,
    config: TuneConfig,
    *,
    model: dict[str, Any],
) -> Tuned:
    """Find the fastest drafter and its settings.

    Args:
        today: the drafter in use.
        model: settings of the target; they must be those of the run that is resumed.

    Errors: `ConfigError`, `CorruptFile`, `DataError`, `NotLossless`, those of the adapters.
    """
    output, watch = Path(config.output), Watch()
    config.search.check()
    chosen = split(load_questions(config.bench), config)
    log.info("%s", told(chosen, config.seed))
    found = sources(lm, model["name"], config.search)
    traced = traces(lm, tokenizer, found, chosen.tuning, config, model)
    watch.lap("trace")
    player = Player(lm, found)
    seconds, exact = timed(lm, tokenizer, player, traced, config)
    log.info("%d of %d turns were decoded in exactly the rounds of their replay", *exact)
    watch.lap("measure")
    scores = searched(player, config.search, traced, seconds)
    watch.lap("search")
    decode = config.bench, config.max_new_tokens, config.resume
    decoding = Decoding(lm, tokenizer, output, *decode, model)
    few = confirmed_by(scores, today, found, config.search, config.confirm)
    count = config.confirm_questions
    confirmed = confirm(decoding, few, chosen.tuning, traced, player, seconds, count)
    best = max(confirmed, key=lambda one: one.speedup)
    watch.lap("confirm")
    report, gain = reported(decoding, confirmed[0], best, chosen.reporting)
    watch.lap("report")
    return Tuned(
        chosen, found, seconds, exact, scores, confirmed, best, report, gain, watch.seconds
    )


class Watch:
    """Seconds of each part of a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        """A part has ended."""
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now


def split(questions: Sequence[Question], config: TuneConfig) -> Split:
    """Two lists with no question in common, each spread over the tasks; the same for a seed.

    Errors: `ConfigError` where the bench has too few.
    """
    wanted = config.tuning_questions, config.reporting_questions
    if sum(wanted) > len(questions):
        raise ConfigError(
            f"tuning_questions={wanted[0]} and reporting_questions={wanted[1]} must together be no "
            f"more than the {len(questions)} questions of the bench, since none may be in both."
        )
    by_task: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_task[question.task].append(question)
    rng = random.Random(config.seed)
    for some in by_task.values():
        rng.shuffle(some)
    # a task after another in turn, so that the first of them hold a like number of each
    most = max(map(len, by_task.values()))
    dealt = [some[i] for i in range(most) for some in by_task.values() if i < len(some)]
    order = [dealt[: wanted[0]], dealt[wanted[0] : sum(wanted)]]
    return Split(*(sorted(some, key=lambda question: question.question_id) for some in order))


def told(chosen: Split, seed: int) -> str:
    """What the split is, in words."""
    counts = len(chosen.tuning), len(chosen.reporting)
    return (
        f"settings are chosen by {counts[0]} questions and reported on {counts[1]} others (seed "
        f"{seed}); none is in both"
    )


def traces(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    found: dict[str, Source],
    questions: Sequence[Question],
    config: TuneConfig,
    model: dict[str, Any],
) -> list[TracedQuestion]:
    """The traces of these questions."""
    everything = [item for source in found.values() for item in source.traced.items()]
    recorder = Recorder(lm, dict(everything))
    drafters = {name: source.config.settings() for name, source in found.items()}
    top_k = config.search.top_k if "kangaroo_tree" in config.search.drafters else None
    settings = {"model": model, "drafters": drafters, "top_k": top_k}
    folder = Path(config.output, "trace")
    if not config.resume:
        for old in folder.glob("*"):
            old.unlink()
    limit = config.max_new_tokens
    return trace_bench(recorder, tokenizer, questions, limit, folder, settings)


def timed(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    player: Player,
    traced: Sequence[TracedQuestion],
    config: TuneConfig,
) -> tuple[CostsOf, tuple[int, int]]:
    """What rounds take; see `measure`. A run that goes on takes what it began with, since its
    choices follow from that.
    """
    file = Path(config.output, "costs.json")
    about = {
        "trace": json.loads(Path(config.output, "trace", trace.ABOUT).read_text("utf-8")),
        "settings": asdict(config.search) | {"seed": config.seed},
        "questions": [question.question_id for question in traced],
        "limits": [config.measure_turns, config.measure_tokens],
        "machine": [platform.node(), torch.get_num_threads(), build_name()],
    }
    key = trace.fingerprint(about)
    found = costs.load(file, key) if config.resume else None
    if found is None:
        limits = config.measure_turns, config.measure_tokens
        found = measure(lm, tokenizer, player, config.search, traced, *limits)
        costs.save(file, key, *found)
    return found


def searched(
    player: Player, space: SearchSpace, traced: Sequence[TracedQuestion], seconds: CostsOf
) -> list[Score]:
    """All candidates, the fastest first."""
    vanilla_Q = vanilla_seconds(traced, seconds)
    tried = tqdm(candidates(space, list(player.sources.values())), unit="setting", desc="replaying")
    scores = [score(one, player.of(one), traced, seconds, vanilla_Q) for one in tried]
    return sorted(scores, key=lambda one: -one.speedup)


def best_by_task(scores: Sequence[Score]) -> dict[str, Score]:
    """The fastest on each task, over this task alone."""
    best: dict[str, Score] = {}
    for one in scores:
        for task, own in one.by_task().items():
            if task not in best or own.speedup > best[task].speedup:
                best[task] = own
    return best
