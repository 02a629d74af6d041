"""Tune: decode with many settings on some questions, and report the fastest on others, beside the
drafter in use; all by evaluate, so a run that was stopped goes on.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kangaroo.drafters.base import DrafterConfig
from kangaroo.evaluation import comparison
from kangaroo.evaluation.bench import BenchConfig, Question, load_questions, spread
from kangaroo.evaluation.run import Baseline, EvaluateConfig, Evaluator, MethodSpec
from kangaroo.models.prompts import Tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import write_json
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranges import Count, Ranged

log = logging.getLogger(__name__)

TODAY = "today"  # what results call the drafter that is in use
GROUP = 8  # drafters that are in memory together
NUMBERS, SETTINGS = "tune.json", Path("drafter", "tuned.yaml")


@dataclass
class TuneConfig(Ranged):
    """Which questions settings are chosen by, and which the result is reported on.

    Args:
        output: folder of everything; a run that was stopped goes on from there.
        tuning_questions, reporting_questions: so many of each, spread over the bench's tasks.
        max_new_tokens: of a turn.
        resume: false forgets what `output` holds.
    """

    output: str
    bench: BenchConfig = field(default_factory=BenchConfig)
    tuning_questions: Count = 12
    reporting_questions: Count = 24
    max_new_tokens: Count = 64
    resume: bool = True


def tune(
    lm: TargetModel,
    tokenizer: Tokenizer,
    drafters: Mapping[str, DrafterConfig],
    today: DrafterConfig,
    config: TuneConfig,
    *,
    model: dict[str, Any],
    use: str,
) -> comparison.Comparison:
    """Find the fastest of some drafters, by name, and write `drafter/tuned.yaml` and `tune.json`.
    Returns its comparison with today's on the questions for reporting.

    Args:
        model: settings of the target; they must be those of the run that is resumed.
        use: the command that measures the drafter of `drafter/tuned.yaml`.

    Errors: those of evaluations; `ConfigError` where the bench has too few questions.
    """
    tuning, reporting = split(load_questions(config.bench), config)
    output, settings = Path(config.output), {TODAY: today, **drafters}

    def answer(part: str, names: Sequence[str], questions: Sequence[Question]) -> list[Any]:
        """The summaries of some drafters, all and vanilla decoding taking turns."""
        file = output / part / "questions.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(asdict(each)) + "\n" for each in questions), "utf-8")
        evaluation = EvaluateConfig(
            output=str(file.parent),
            bench=replace(config.bench, path=str(file), url=None, sha256=None),
            max_new_tokens=config.max_new_tokens,
            baselines=[Baseline.vanilla],
            warmup=1,
            resume=config.resume,
        )
        methods = [MethodSpec.of(name, settings[name], lm, model) for name in names]
        return Evaluator(lm, tokenizer, methods, evaluation, model_name=model["name"]).finish()

    names, tried = list(settings), []
    for at in range(0, len(names), GROUP):
        log.info("settings %d to %d of %d", at + 1, min(at + GROUP, len(names)), len(names))
        tried += answer(f"tried/group-{at // GROUP}", names[at : at + GROUP], tuning)
    tried.sort(key=lambda summary: -summary["overall"]["speedup"])
    best = tried[0]["drafter"]
    answer(f"report/{best}", list(dict.fromkeys((TODAY, best))), reporting)
    report = comparison.compare(output / "report" / best)
    assert report is not None
    comparison.write(report, output / "report" / best)
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
    return report


def split(
    questions: Sequence[Question], config: TuneConfig
) -> tuple[list[Question], list[Question]]:
    """Those for tuning and those for reporting; no question is in both."""
    wanted = config.tuning_questions, config.reporting_questions
    if sum(wanted) > len(questions):
        raise ConfigError(
            f"tuning_questions={wanted[0]} and reporting_questions={wanted[1]} must together be no "
            f"more than the {len(questions)} questions of the bench, since none may be in both."
        )
    tuning = spread(questions, wanted[0])
    chosen = {question.question_id for question in tuning}
    others = [question for question in questions if question.question_id not in chosen]
    return tuning, spread(others, wanted[1])


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
