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
from kangaroo.evaluation import comparison
from kangaroo.evaluation.bench import BenchConfig, Question, load_questions
from kangaroo.evaluation.comparison import conclusion
from kangaroo.evaluation.config import Baseline, EvaluateConfig, MethodSpec
from kangaroo.evaluation.metrics import Place
from kangaroo.evaluation.records import write_json
from kangaroo.evaluation.run import Evaluator
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


@dataclass(frozen=True)
class Decoding:
    """Answers questions with some drafters, all and vanilla decoding taking turns."""

    lm: TargetModel
    tokenizer: PreTrainedTokenizerBase
    config: TuneConfig
    model: dict[str, Any]

    def answer(
        self, folder: Path, drafters: Mapping[str, DrafterConfig], questions: Sequence[Question]
    ) -> Summaries:
        """The summaries, each in a folder of its drafter's name.

        Errors: those of `Evaluator` and its `finish`.
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
        run = Evaluator(self.lm, self.tokenizer, methods, settings, model_name=name)
        return run.finish()

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
    use: str,
) -> comparison.Comparison:
    """Find the fastest of some drafters, and write `drafter/tuned.yaml`, `tune.md` and `tune.json`.
    Returns the comparison of today's drafter with it on the questions for reporting.

    Args:
        drafters: every setting that is tried, by name.
        today: the drafter in use.
        model: settings of the target; they must be those of the run that is resumed.
        use: the command that measures the drafter of `drafter/tuned.yaml`.

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
    settings = {TODAY: today, **drafters}
    second = decoding.compete(output / "second", {x: settings[x] for x in (TODAY, *few)}, tuning)
    best = second[0]["drafter"]
    both = {name: settings[name] for name in (TODAY, best)}
    decoding.answer(output / "report", both, reporting)
    # an earlier search may have left another drafter's results beside these
    report = comparison.compare(output / "report", [*both, "vanilla"] if len(both) > 1 else [TODAY])
    assert report is not None
    comparison.write(report, output / "report")
    write_settings(settings[best], output, use)
    names = ("speedup", "speedup_ci95", "compression_rate", "tokens_per_second")
    rounds = [
        [{"name": s["drafter"]} | {name: s["overall"][name] for name in names} for s in summaries]
        for summaries in (first, second)
    ]
    ids = [[question.question_id for question in part] for part in (tuning, reporting)]
    numbers = {"best": best, "tuning": ids[0], "reporting": ids[1], "rounds": rounds}
    about = {part.name: asdict(config)[part.name] for part in fields(TuneConfig)}
    write_json(output / NUMBERS, numbers | {"settings": about, "provenance": provenance()})
    (output / PAGE).write_text(page(numbers, report, config.seed, use), encoding="utf-8")
    return report


def page(numbers: dict[str, Any], report: comparison.Comparison, seed: int, use: str) -> str:
    """Everything, in Markdown.

    Args:
        numbers: as in `tune.json`.
    """
    second, first = ([row(setting) for setting in each] for each in numbers["rounds"][::-1])
    parts = [
        f"# Tuning {report['model']} on {report['bench']}, {report['dtype']}, {report['device']}",
        f"The fastest is **`{numbers['best']}`**. Use it: `{use}`. Settings are chosen by "
        f"{len(numbers['tuning'])} questions and reported on {len(numbers['reporting'])} others "
        f"(seed {seed}); none is in both.",
        "## On questions that nothing was chosen by",
        conclusion(report),
        markdown(comparison.rows_of(report["methods"], Place.methods)),
        "![speedup](report/speedup.png)\n\n[All of it](report/report.md)",
        "## The best settings, on all questions for tuning",
        markdown(second),
        "## All settings, on a third of these questions",
        markdown(first),
        made_by(),
    ]
    return "\n\n".join(parts) + "\n"


def row(setting: dict[str, Any]) -> Row:
    """A setting in a table."""
    return {
        "setting": setting["name"],
        "speedup (95%)": estimate(setting["speedup"], setting["speedup_ci95"]),
        "CR": number(setting["compression_rate"]),
        "tokens/s": number(setting["tokens_per_second"], 1),
    }


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
