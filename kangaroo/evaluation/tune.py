"""Tuning: evaluate many settings on some questions, and report the fastest on others, beside the
drafter in use. A run that was stopped is resumed, as evaluations are."""

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
from kangaroo.utils.folders import write_json, write_whole
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranges import Count, Ranged

log = logging.getLogger(__name__)

TODAY = "today"  # the name of the drafter in use
GROUP = 8  # how many drafters are in memory at a time
NUMBERS = "tune.json"
SETTINGS = Path("drafter", "tuned.yaml")


@dataclass
class TuneConfig(Ranged):
    """Questions that choose settings, and questions on which the result is reported.

    Args:
        output: folder of all results; a run that was stopped is resumed from it.
        tuning_questions, reporting_questions: how many, spread over the bench's tasks.
        max_new_tokens: limit of a turn.
        resume: false deletes what `output` holds.
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
    """Find the fastest of `drafters`, by name, and write `drafter/tuned.yaml` and `tune.json`.
    Returns its comparison with `today`, the drafter in use, on the questions for reporting. `model`
    has the target's settings, which must match when a run is resumed; `use` is the command that
    measures `drafter/tuned.yaml`. Errors: those of evaluations, and of `split`."""
    tuning, reporting = split(load_questions(config.bench), config)
    output = Path(config.output)
    settings = {TODAY: today, **drafters}

    def evaluate(part: str, names: Sequence[str], questions: Sequence[Question]) -> list[Any]:
        """Summaries of some drafters, which take turns with vanilla decoding."""
        file = output / part / "questions.jsonl"
        write_whole(file, "".join(json.dumps(asdict(x)) + "\n" for x in questions).encode())
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

    names = list(settings)
    tried = []
    for start in range(0, len(names), GROUP):
        group = names[start : start + GROUP]
        log.info("measuring settings %d to %d of %d", start + 1, start + len(group), len(names))
        tried += evaluate(f"tried/group-{start // GROUP}", group, tuning)
    tried.sort(key=lambda summary: -summary["overall"]["speedup"])
    best = tried[0]["drafter"]
    folder = output / "report" / best
    evaluate(f"report/{best}", list(dict.fromkeys((TODAY, best))), reporting)
    report = comparison.compare(folder)
    assert report is not None
    comparison.write(report, folder)
    write_settings(settings[best], output, use)
    metrics = ("speedup", "speedup_ci95", "compression_rate", "tokens_per_second")
    numbers = {
        "best": best,
        "tuning": [question.question_id for question in tuning],
        "reporting": [question.question_id for question in reporting],
        "tried": [{"name": x["drafter"]} | {m: x["overall"][m] for m in metrics} for x in tried],
        "settings": {part.name: asdict(config)[part.name] for part in fields(TuneConfig)},
        "provenance": provenance(),
    }
    write_json(output / NUMBERS, numbers)
    return report


def split(
    questions: Sequence[Question], config: TuneConfig
) -> tuple[list[Question], list[Question]]:
    """Disjoint questions for tuning and for reporting. Errors: `ConfigError` for too few."""
    if config.tuning_questions + config.reporting_questions > len(questions):
        raise ConfigError(
            f"tuning_questions={config.tuning_questions} and "
            f"reporting_questions={config.reporting_questions} must together be "
            f"no more than the {len(questions)} questions of the bench, since none may be in both."
        )
    tuning = spread(questions, config.tuning_questions)
    rest = [question for question in questions if question not in tuning]
    return tuning, spread(rest, config.reporting_questions)


def write_settings(drafter: DrafterConfig, output: Path, use: str) -> None:
    """Write the drafter as a file of Hydra's group `drafter`."""
    defaults: list[Any] = [f"{drafter.name}_schema"]
    settings = asdict(drafter)
    del settings["name"]
    for name, part in vars(drafter).items():
        if isinstance(part, DrafterConfig):  # a part of a cascade
            defaults.append({f"/drafter@{name}": part.name})
            del settings[name]["name"]
    text = yaml.safe_dump({"defaults": [*defaults, "_self_"]} | settings, sort_keys=False)
    write_whole(output / SETTINGS, f"# Found by tuning: {use}\n{text}".encode())
