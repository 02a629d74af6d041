"""Tune: decode with many settings on some questions, and report the fastest on others, beside the
drafter that is in use. Decoding, records, tables and plots are evaluate's own, so a run that was
stopped goes on.
"""

from __future__ import annotations

import json
import logging
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
from kangaroo.evaluation.config import Baseline, EvaluateConfig, MethodSpec
from kangaroo.evaluation.records import write_json
from kangaroo.evaluation.run import Evaluator
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import made_by, provenance
from kangaroo.utils.ranges import Count, Ranged, Seed
from kangaroo.utils.tables import estimate, markdown, number

log = logging.getLogger(__name__)

TODAY = "today"  # what results call the drafter that is in use
GROUP = 8  # drafters that are in memory together
PAGE, NUMBERS, SETTINGS = "tune.md", "tune.json", Path("drafter", "tuned.yaml")


@dataclass
class TuneConfig(Ranged):
    """Which questions settings are chosen by, and which the result is reported on.

    Args:
        output: folder of everything; a run that was stopped goes on from there.
        seed: of the split into questions for tuning and for reporting.
        tuning_questions, reporting_questions: so many of each, spread over the bench's tasks.
        max_new_tokens: of a turn.
        resume: false forgets what `output` holds.
    """

    output: str
    bench: BenchConfig = field(default_factory=BenchConfig)
    seed: Seed = 0
    tuning_questions: Count = 12
    reporting_questions: Count = 24
    max_new_tokens: Count = 64
    resume: bool = True


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
    output, settings = Path(config.output), {TODAY: today, **drafters}

    def answer(part: str, names: Sequence[str], questions: Sequence[Question]) -> list[Any]:
        """The summaries of some drafters, all and vanilla decoding taking turns."""
        folder = output / part
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "questions.jsonl"
        lines = [json.dumps(asdict(question)) + "\n" for question in questions]
        file.write_text("".join(lines), "utf-8")
        evaluation = EvaluateConfig(
            output=str(folder if len(names) > 1 else folder / names[0]),
            bench=replace(config.bench, path=str(file), url=None, sha256=None),
            max_new_tokens=config.max_new_tokens,
            baselines=[Baseline.vanilla],
            warmup=1,
            resume=config.resume,
        )
        methods = [
            MethodSpec(
                name,
                settings[name].build(lm),
                {"model": model, "drafter": settings[name].settings()},
                settings[name].made_by(),
            )
            for name in names
        ]
        return Evaluator(lm, tokenizer, methods, evaluation, model_name=model["name"]).finish()

    names, tried = list(settings), []
    for at in range(0, len(names), GROUP):
        log.info("settings %d to %d of %d", at + 1, min(at + GROUP, len(names)), len(names))
        tried += answer(f"tried/group-{at // GROUP}", names[at : at + GROUP], tuning)
    tried.sort(key=lambda summary: -summary["overall"]["speedup"])
    best = tried[0]["drafter"]
    both = list(dict.fromkeys((TODAY, best)))
    answer("report", both, reporting)
    # an earlier search may have left another drafter's results beside these
    report = comparison.compare(output / "report", [*both, "vanilla"] if len(both) > 1 else both)
    assert report is not None
    comparison.write(report, output / "report")
    write_settings(settings[best], output, use)
    metrics = ("speedup", "speedup_ci95", "compression_rate", "tokens_per_second")
    numbers = {
        "best": best,
        "tuning": [question.question_id for question in tuning],
        "reporting": [question.question_id for question in reporting],
        "tried": [
            {"name": each["drafter"]} | {name: each["overall"][name] for name in metrics}
            for each in tried
        ],
        "settings": {part.name: asdict(config)[part.name] for part in fields(TuneConfig)},
        "provenance": provenance(),
    }
    write_json(output / NUMBERS, numbers)
    (output / PAGE).write_text(page(numbers, report, use), encoding="utf-8")
    return report


def page(numbers: dict[str, Any], report: comparison.Comparison, use: str) -> str:
    """Everything, in Markdown.

    Args:
        numbers: as in `tune.json`.
    """
    tried = [
        {
            "setting": each["name"],
            "speedup (95%)": estimate(each["speedup"], each["speedup_ci95"]),
            "CR": number(each["compression_rate"]),
            "tokens/s": number(each["tokens_per_second"], 1),
        }
        for each in numbers["tried"]
    ]
    parts = [
        f"# Tuning {report['model']} on {report['bench']}, {report['dtype']}, {report['device']}",
        f"The fastest is **`{numbers['best']}`**. Use it: `{use}`. Settings are chosen by "
        f"{len(numbers['tuning'])} questions and reported on {len(numbers['reporting'])} others "
        f"(seed {numbers['settings']['seed']}); none is in both.",
        "## On questions that nothing was chosen by",
        comparison.conclusion(report),
        markdown(comparison.rows_of(report["methods"])),
        "![speedup](report/speedup.png)\n\n[All of it](report/report.md)",
        "## All settings, on the questions for tuning",
        markdown(tried),
        made_by(),
    ]
    return "\n\n".join(parts) + "\n"


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
