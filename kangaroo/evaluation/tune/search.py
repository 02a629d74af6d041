"""Tune a model's drafter: trace, search by replay, confirm by decoding, report.

Read it top to bottom. Questions that something is chosen by, and questions that the result is
reported on, are never the same. Decoding, its tables and plots are `evaluate.py`'s own.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.base import DrafterConfig
from kangaroo.engine.costs import measured
from kangaroo.evaluation import comparison, run
from kangaroo.evaluation.bench import BenchConfig, Question, load_questions
from kangaroo.evaluation.config import Baseline, EvaluateConfig, MethodSpec
from kangaroo.evaluation.tune.candidates import Candidate, SearchSpace, Source, candidates, sources
from kangaroo.evaluation.tune.costs import Score, score
from kangaroo.evaluation.tune.recording import Recorder, trace_bench
from kangaroo.evaluation.tune.replay import Player
from kangaroo.evaluation.tune.trace import TracedQuestion
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import MOST_NODES, Count, Ranged, Seed

log = logging.getLogger(__name__)

TODAY = "today"  # what results call the drafter that is in use
TRACE, CONFIRM, REPORT = "trace", "confirm", "report"  # folders


@dataclass
class TuneConfig(Ranged):
    """What is searched, and on which questions.

    Args:
        output: folder of everything; a run that was stopped goes on from there.
        seed: of the split into questions for tuning and for reporting.
        tuning_questions, reporting_questions: so many of each, spread over the bench's tasks.
        max_new_tokens: of a turn.
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
    confirm: Count = 3
    confirm_questions: Count = 10
    resume: bool = True


@dataclass
class Tuned:
    """All that a tuning brings to light.

    Args:
        tuning, reporting: questions that settings were chosen by, and others.
        scores: of all candidates, the fastest first.
        predicted: those that were decoded, on the questions that they decoded, by name.
        confirmed: what decoding gave (`kangaroo.evaluation.comparison.compare`), today's drafter
            among them.
        best: the name of the fastest of these, and its settings.
        report: the comparison of today's drafter with the best on the questions for reporting.
    """

    tuning: list[Question]
    reporting: list[Question]
    scores: list[Score]
    predicted: dict[str, Score]
    confirmed: dict[str, Any]
    best: tuple[str, DrafterConfig]
    report: dict[str, Any]


def tune(
    lm: TargetModel,
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
    config.search.check()
    tuning, reporting = split(load_questions(config.bench), config)
    log.info(
        "settings are chosen by %d questions and reported on %d others (seed %d); none is in both",
        *(len(tuning), len(reporting), config.seed),
    )
    by_name = sources(lm, model["name"], config.search)
    if not config.resume:
        for folder in (TRACE, CONFIRM, REPORT):
            shutil.rmtree(Path(config.output, folder), ignore_errors=True)
    traced = traces(lm, tokenizer, by_name, tuning, config, model)
    player, verify_N = Player(lm, by_name), np.array(measured(lm).curve(1, MOST_NODES))
    tried = tqdm(candidates(config.search, by_name), unit="setting", desc="replaying")
    scores = [score(candidate, player, traced, verify_N) for candidate in tried]
    scores.sort(key=lambda score: -score.speedup)
    fastest = [score.candidate for score in best_by(scores, lambda x: x.config.name)]
    few = {x.name: x for x in fastest[: config.confirm] if x.config != today}
    drafters = {TODAY: today} | {name: candidate.config for name, candidate in few.items()}
    count = min(config.confirm_questions, len(traced))
    places = np.unique(np.linspace(0, len(traced) - 1, count).round().astype(int)).tolist()
    target, output = (lm, tokenizer, config, model), Path(config.output)
    confirmed = decode(*target, output / CONFIRM, drafters, [tuning[place] for place in places])
    some = [traced[place] for place in places]
    predicted = {name: score(x, player, some, verify_N) for name, x in few.items()}
    best = next(x["name"] for x in confirmed["methods"] if x["name"] in drafters)
    both = {name: drafters[name] for name in (TODAY, best)}
    report = decode(*target, output / REPORT, both, reporting)
    return Tuned(tuning, reporting, scores, predicted, confirmed, (best, drafters[best]), report)


def best_by(scores: Iterable[Score], group: Callable[[Candidate], Hashable]) -> list[Score]:
    """The fastest of each group; `scores` has the fastest first."""
    best: dict[Hashable, Score] = {}
    for result in scores:
        best.setdefault(group(result.candidate), result)
    return list(best.values())


def split(
    questions: Sequence[Question], config: TuneConfig
) -> tuple[list[Question], list[Question]]:
    """Those for tuning and those for reporting, no question in both and each list spread over the
    tasks; the same for a seed.

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
    tuning, reporting = dealt[: wanted[0]], dealt[wanted[0] : sum(wanted)]
    for some in (tuning, reporting):
        some.sort(key=lambda question: question.question_id)
    return tuning, reporting


def traces(
    lm: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    by_name: Mapping[str, Source],
    questions: Sequence[Question],
    config: TuneConfig,
    model: dict[str, Any],
) -> list[TracedQuestion]:
    """The traces of these questions.

    Errors: also `ConfigError` where no text has a round.
    """
    drafters = {k: v for source in by_name.values() for k, v in source.traced.items()}
    settings = {
        "model": model,
        "drafters": {name: source.config.settings() for name, source in by_name.items()},
        "top_k": config.search.top_k if "kangaroo_tree" in config.search.drafters else None,
    }
    place = config.max_new_tokens, Path(config.output, TRACE), settings
    traced = trace_bench(Recorder(lm, drafters), tokenizer, questions, *place)
    if all(len(turn.text) == 1 for question in traced for turn in question.turns):
        raise ConfigError("every answer is a single token, so there is no round to draft in.")
    return traced


def decode(
    lm: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    config: TuneConfig,
    model: dict[str, Any],
    folder: Path,
    drafters: Mapping[str, DrafterConfig],
    questions: Sequence[Question],
) -> dict[str, Any]:
    """Answer these questions with some drafters, all and vanilla decoding taking turns, and compare
    them. All that an evaluation writes is in the folder.

    Errors: those of `kangaroo.evaluation.run.evaluate` and of `comparison.compare`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(asdict(question)) + "\n" for question in questions), "utf-8")
    settings = EvaluateConfig(
        output=str(folder if len(drafters) > 1 else folder / TODAY),
        bench=replace(config.bench, path=str(file), url=None, sha256=None),
        max_new_tokens=config.max_new_tokens,
        baselines=[Baseline.vanilla],
        warmup=1,
    )
    methods = []
    for name, drafter in drafters.items():
        about = {"model": model, "drafter": drafter.settings()}
        methods.append(MethodSpec(name, drafter.build(lm), about, drafter.made_by()))
    run.evaluate(lm, tokenizer, methods, settings, model_name=model["name"])
    # an earlier search may have left other candidates' results beside these
    names = [*drafters, "vanilla"] if len(drafters) > 1 else [TODAY]
    compared = comparison.compare(folder, names)
    assert compared is not None
    comparison.write(compared, folder)
    return compared
