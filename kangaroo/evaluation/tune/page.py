"""What a tuning brings to light, as files: the drafter's settings, a page, and all numbers."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.cascade import CascadeConfig
from kangaroo.evaluation import comparison
from kangaroo.evaluation.comparison import sentences
from kangaroo.evaluation.metrics import Place
from kangaroo.evaluation.records import write_json
from kangaroo.evaluation.tune.costs import Score
from kangaroo.evaluation.tune.search import TuneConfig, Tuned, best_by
from kangaroo.utils.provenance import made_by, provenance
from kangaroo.utils.tables import Row, markdown, number

PAGE, NUMBERS, SETTINGS = "tune.md", "tune.json", Path("drafter", "tuned.yaml")


def write(tuned: Tuned, config: TuneConfig, about: str, use: str) -> None:
    """Write all files to the output's folder.

    Args:
        about: what was tuned, in words.
        use: the command that measures the drafter that was found.
    """
    output, (best, drafter) = Path(config.output), tuned.best
    write_settings(drafter, output, use)
    numbers = {
        "best": best,
        "tuning": [question.question_id for question in tuned.tuning],
        "reporting": [question.question_id for question in tuned.reporting],
        "predicted": {name: as_numbers(score) for name, score in tuned.predicted.items()},
        "scores": [as_numbers(score) for score in tuned.scores],
        "settings": {part.name: asdict(config)[part.name] for part in fields(TuneConfig)},
        "provenance": provenance(),
    }
    write_json(output / NUMBERS, numbers)
    (output / PAGE).write_text(page(tuned, config, about, use), encoding="utf-8")


def write_settings(drafter: DrafterConfig, output: Path, use: str) -> None:
    """The drafter as a file of Hydra's group `drafter`."""
    defaults: list[Any] = [f"{drafter.name}_schema"]
    settings = asdict(drafter)
    if isinstance(drafter, CascadeConfig):
        parts = {"first": drafter.first.name, "second": drafter.second.name}
        defaults += [{f"/drafter@{part}": name} for part, name in parts.items()]
        for part in parts:
            del settings[part]["name"]
    del settings["name"]
    file = output / SETTINGS
    file.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({"defaults": [*defaults, "_self_"]} | settings, sort_keys=False)
    file.write_text(f"# Found by tuning: {use}\n{text}", encoding="utf-8")


def page(tuned: Tuned, config: TuneConfig, about: str, use: str) -> str:
    """Everything, in Markdown; what was decoded, by evaluate's tables and plots."""
    best, counts = tuned.best[0], (len(tuned.tuning), len(tuned.reporting))
    searched = [
        {"setting": score.candidate.name, "speedup": number(score.speedup)}
        | {"CR": number(score.compression_rate)}
        for score in best_by(tuned.scores, lambda x: (x.config.name, x.source))
    ]
    parts = [
        f"# Tuning {about}",
        f"The fastest is **`{best}`**. Use it: `{use}`. Settings are chosen by {counts[0]} "
        f"questions and reported on {counts[1]} others (seed {config.seed}); none is in both.",
        "## On questions that nothing was chosen by",
        *sentences(tuned.report),
        markdown(comparison.rows_of(tuned.report["methods"], Place.methods)),
        "![speedup](report/speedup.png)\n\n[All of it](report/report.md)",
        "## Prediction and decoding",
        "On a part of the questions for tuning ([all of it](confirm/report.md)), prompts not "
        "included. Where both compression rates are the same, replay had the rounds of decoding, "
        "and a difference of the speedups is score of time alone.",
        markdown(predictions(tuned)),
        "## The search",
        f"{len(tuned.scores)} settings were replayed. The best of each drafter and adapter, their "
        "speedups (prompts not included) predicted on the questions for tuning:",
        markdown(searched),
        made_by(),
    ]
    return "\n\n".join(parts) + "\n"


def predictions(tuned: Tuned) -> list[Row]:
    """What was foreseen of each drafter that was decoded, and what came of it."""
    overall = {method["name"]: method["overall"] for method in tuned.confirmed["methods"]}
    return [
        {
            "drafter": name,
            "predicted": number(score.speedup),
            "decoding": number(overall[name]["decoding_speedup"]),
            "CR predicted": number(score.compression_rate, 3),
            "CR": number(overall[name]["compression_rate"], 3),
        }
        for name, score in tuned.predicted.items()
    ]


def as_numbers(score: Score) -> dict[str, Any]:
    """A setting as replay foresees it."""
    name, rate = score.candidate.name, score.compression_rate
    return {"name": name, "speedup": score.speedup, "compression_rate": rate}
