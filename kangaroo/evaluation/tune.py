"""Tune: decode with many settings on a few questions, with the best of them on more, and report the
fastest on others, beside the drafter that is in use.

Decoding, its records, tables and plots are evaluate's own, so a run that was stopped goes on.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.base import DrafterConfig
from kangaroo.evaluation import comparison, run
from kangaroo.evaluation.bench import BenchConfig, Question, load_questions
from kangaroo.evaluation.comparison import sentences
from kangaroo.evaluation.config import Baseline, EvaluateConfig, MethodSpec
from kangaroo.evaluation.metrics import Place
from kangaroo.evaluation.records import write_json
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import made_by, provenance
from kangaroo.utils.ranges import Count, Ranged, Seed
from kangaroo.utils.tables import Row, estimate, markdown, number

log = logging.getLogger(__name__)

TODAY = "today"  # what results call the drafter that is in use
GROUP = 8  # drafters that are in memory together
KEPT = (
    3  # of so many settings one goes into the second round; of so many questions the first has one
)
PAGE, NUMBERS, SETTINGS = "tune.md", "tune.json", Path("drafter", "tuned.yaml")

Summaries = list[dict[str, Any]]  # of the settings of a round, the fastest first


@dataclass
class TuneConfig(Ranged):
    """Which questions settings are chosen by, and which the result is reported on.

    Args:
        output: folder of everything; a run that was stopped goes on from there.
        seed: of the split into questions for tuning and for reporting.
        tuning_questions, reporting_questions: so many of each, spread over the bench's tasks. All
            settings answer every third of the former, the best third of the settings all of them.
        max_new_tokens: of a turn.
        resume: false forgets what `output` holds.
    """

    output: str
    bench: BenchConfig = field(default_factory=BenchConfig)
    seed: Seed = 0
    tuning_questions: Count = 18
    reporting_questions: Count = 24
    max_new_tokens: Count = 64
    resume: bool = True


@dataclass
class Tuned:
    """All that a tuning brings to light.

    Args:
        tuning, reporting: questions that settings were chosen by, and others.
        rounds: the summaries of all settings on a part of the former, and of the best and of
            today's drafter on all of these.
        best: the name of the fastest of the second round, and its settings.
        report: the comparison of today's drafter with the best on the questions for reporting.
    """

    tuning: list[Question]
    reporting: list[Question]
    rounds: list[Summaries]
    best: tuple[str, DrafterConfig]
    report: comparison.Comparison


class Decoding:
    """Answers questions with some drafters, all and vanilla decoding taking turns."""

    def __init__(
        self,
        lm: TargetModel,
        tokenizer: PreTrainedTokenizerBase,
        config: TuneConfig,
        model: dict[str, Any],
    ):
        self.lm, self.tokenizer, self.config, self.model = lm, tokenizer, config, model

    def answer(
        self, folder: Path, drafters: Mapping[str, DrafterConfig], questions: Sequence[Question]
    ) -> Summaries:
        """The summaries, each in a folder of its drafter's name.

        Errors: those of `kangaroo.evaluation.run.evaluate`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "questions.jsonl"
        lines = [json.dumps(asdict(question)) + "\n" for question in questions]
        file.write_text("".join(lines), "utf-8")
        settings = EvaluateConfig(
            output=str(folder if len(drafters) > 1 else folder / min(drafters)),
            bench=replace(self.config.bench, path=str(file), url=None, sha256=None),
            max_new_tokens=self.config.max_new_tokens,
            baselines=[Baseline.vanilla],
            warmup=1,
            resume=self.config.resume,
        )
        methods = []
        for name, drafter in drafters.items():
            about = {"model": self.model, "drafter": drafter.settings()}
            methods.append(MethodSpec(name, drafter.build(self.lm), about, drafter.made_by()))
        name = self.model["name"]
        return run.evaluate(self.lm, self.tokenizer, methods, settings, model_name=name)

    def compete(
        self, folder: Path, drafters: Mapping[str, DrafterConfig], questions: Sequence[Question]
    ) -> Summaries:
        """The same in groups, the fastest drafter first."""
        names, summaries = list(drafters), []
        for at in range(0, len(names), GROUP):
            group = {name: drafters[name] for name in names[at : at + GROUP]}
            log.info(
                "%s: settings %d to %d of %d", folder.name, at + 1, at + len(group), len(names)
            )
            summaries += self.answer(folder / f"group-{at // GROUP}", group, questions)
        return sorted(summaries, key=lambda summary: -summary["overall"]["speedup"])


def tune(
    lm: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Mapping[str, DrafterConfig],
    today: DrafterConfig,
    config: TuneConfig,
    *,
    model: dict[str, Any],
) -> Tuned:
    """Find the fastest of some drafters.

    Args:
        drafters: every setting that is tried, by name.
        today: the drafter in use.
        model: settings of the target; they must be those of the run that is resumed.

    Errors: `ConfigError`, `CorruptFile`, `DataError`, `NotLossless`, those of the adapters.
    """
    tuning, reporting = split(load_questions(config.bench), config)
    log.info(
        "settings are chosen by %d questions and reported on %d others (seed %d); none is in both",
        *(len(tuning), len(reporting), config.seed),
    )
    output, decoding = Path(config.output), Decoding(lm, tokenizer, config, model)
    first = decoding.compete(output / "first", drafters, tuning[::KEPT])
    few = [summary["drafter"] for summary in first[: math.ceil(len(first) / KEPT)]]
    known = {TODAY: today, **drafters}
    second = decoding.compete(output / "second", {x: known[x] for x in (TODAY, *few)}, tuning)
    best = second[0]["drafter"]
    both = {name: known[name] for name in (TODAY, best)}
    decoding.answer(output / "report", both, reporting)
    # an earlier search may have left another drafter's results beside these
    report = comparison.compare(output / "report", [*both, "vanilla"] if len(both) > 1 else [TODAY])
    assert report is not None
    comparison.write(report, output / "report")
    return Tuned(tuning, reporting, [first, second], (best, known[best]), report)


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


# --- the files


def write(tuned: Tuned, config: TuneConfig, about: str, use: str) -> None:
    """`drafter/tuned.yaml`, `tune.md` and `tune.json`.

    Args:
        about: what was tuned, in words.
        use: the command that measures the drafter that was found.
    """
    output = Path(config.output)
    write_settings(tuned.best[1], output, use)
    numbers = ("speedup", "speedup_ci95", "compression_rate", "tokens_per_second")
    result = {
        "best": tuned.best[0],
        "tuning": [question.question_id for question in tuned.tuning],
        "reporting": [question.question_id for question in tuned.reporting],
        "rounds": [
            [{"name": s["drafter"]} | {name: s["overall"][name] for name in numbers} for s in each]
            for each in tuned.rounds
        ],
        "settings": {part.name: asdict(config)[part.name] for part in fields(TuneConfig)},
        "provenance": provenance(),
    }
    write_json(output / NUMBERS, result)
    (output / PAGE).write_text(page(tuned, config, about, use), encoding="utf-8")


def write_settings(drafter: DrafterConfig, output: Path, use: str) -> None:
    """The drafter as a file of Hydra's group `drafter`."""
    defaults: list[Any] = [f"{drafter.name}_schema"]
    settings = asdict(drafter)
    del settings["name"]
    for name, part in vars(drafter).items():
        if isinstance(part, DrafterConfig):  # of a cascade
            defaults.append({f"/drafter@{name}": part.name})
            del settings[name]["name"]
    file = output / SETTINGS
    file.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({"defaults": [*defaults, "_self_"]} | settings, sort_keys=False)
    file.write_text(f"# Found by tuning: {use}\n{text}", encoding="utf-8")


def page(tuned: Tuned, config: TuneConfig, about: str, use: str) -> str:
    """Everything, in Markdown."""
    counts = len(tuned.tuning), len(tuned.reporting)
    parts = [
        f"# Tuning {about}",
        f"The fastest is **`{tuned.best[0]}`**. Use it: `{use}`. Settings are chosen by "
        f"{counts[0]} questions and reported on {counts[1]} others (seed {config.seed}); none is "
        "in both.",
        "## On questions that nothing was chosen by",
        *sentences(tuned.report),
        markdown(comparison.rows_of(tuned.report["methods"], Place.methods)),
        "![speedup](report/speedup.png)\n\n[All of it](report/report.md)",
        "## The best settings, on all questions for tuning",
        markdown(table(tuned.rounds[1])),
        "## All settings, on a third of these questions",
        markdown(table(tuned.rounds[0])),
        made_by(),
    ]
    return "\n\n".join(parts) + "\n"


def table(summaries: Summaries) -> list[Row]:
    """A row for each setting."""
    return [
        {
            "setting": summary["drafter"],
            "speedup (95%)": estimate(m["speedup"], m["speedup_ci95"]),
            "CR": number(m["compression_rate"]),
        }
        for summary in summaries
        for m in [summary["overall"]]
    ]
