"""What a tuning found, as files: the drafter's settings, a page, numbers and plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.cascade import CascadeConfig
from kangaroo.evaluation.metrics import ends
from kangaroo.evaluation.plots import NAMES
from kangaroo.evaluation.report import within
from kangaroo.evaluation.tune import costs, plots
from kangaroo.evaluation.tune.confirming import Confirmed
from kangaroo.evaluation.tune.player import Score
from kangaroo.evaluation.tune.tune import TuneConfig, Tuned, best_by_task, told
from kangaroo.utils.provenance import made_by, provenance
from kangaroo.utils.tables import Row, markdown, number, share, terminal

PAGE, NUMBERS, SETTINGS = "tune.md", "tune.json", Path("drafter", "tuned.yaml")
MOST = 0.05  # that a prediction may be off
ALIKE = 0.002  # compression rates that are the same, but for a round
SHOWN = 8  # of a long table


def write(found: Tuned, config: TuneConfig, about: str, use: str) -> None:
    """Write all files to the output's folder.

    Args:
        about: what was tuned, in words.
        use: the command that measures the drafter that was found.
    """
    output = Path(config.output)
    write_settings(found.best.candidate.config, output, use)
    (output / NUMBERS).write_text(json.dumps(numbers(found, config), indent=1) + "\n")
    drawn = plots.draw(found, about)
    for name, figure in drawn.items():
        figure.savefig(output / f"{name}.png", dpi=150)
    text = page(found, config, about, use, list(drawn))
    (output / PAGE).write_text(text, encoding="utf-8")


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
    head = f"# Found by tuning: {use}\n"
    text = yaml.safe_dump({"defaults": [*defaults, "_self_"]} | settings, sort_keys=False)
    file.write_text(head + text, encoding="utf-8")


def show(found: Tuned, console: Console) -> None:
    """The result in the terminal."""
    console.print(verdict(found).replace("*", ""), markup=False, highlight=False)
    console.print(terminal(reporting_rows(found), title="on questions that nothing was chosen by"))
    rows = [prediction_row(one) for one in found.confirmed]
    console.print(terminal(rows, title="prediction and decoding"))


def page(found: Tuned, config: TuneConfig, about: str, use: str, drawn: Sequence[str]) -> str:
    """Everything, in Markdown."""
    parts = [
        f"# Tuning {about}",
        verdict(found),
        f"Use it: `{use}`. {told(found.split, config.seed).capitalize()}.",
        "## On questions that nothing was chosen by",
        markdown(reporting_rows(found)),
        "## Prediction and decoding",
        prediction_words(found),
        markdown([prediction_row(one) for one in found.confirmed]),
        "## The search",
        f"{len(found.scores)} settings were replayed in {found.seconds['search']:.0f} s. Their "
        "speedups are predicted, on the questions for tuning.",
        markdown([score_row(one) for one in found.scores[:SHOWN]]),
        "The best setting of each drafter and adapter:",
        markdown([source_row(one, found) for one in best_of_each(found.scores)]),
        "## By task",
        task_words(found),
        markdown(task_rows(found)),
        *(f"![{name}]({name}.png)" for name in drawn),
        "## What rounds take here",
        "Milliseconds, by decoding; `verify n` is the verification of n tokens, the pending one "
        "included, from the exit layer on.",
        markdown(cost_rows(found)),
        "Seconds: " + ", ".join(f"{name} {s:.0f}" for name, s in found.seconds.items()) + ".",
        made_by(),
    ]
    return "\n\n".join(parts) + "\n"


def verdict(found: Tuned) -> str:
    """What came of it, in a sentence or two."""
    if found.gain is None:
        return "**Today's drafter is the best** of those that were decoded: keep it."
    gain, limits = found.gain
    times = f"{gain:.2f}x as fast as today's{within(limits)}"
    sure = ""
    if limits is None:
        sure = " One question does not show a gain."
    elif limits[0] <= 1:
        sure = " The interval holds 1: on these questions, no sure gain."
    if gain <= 1:
        return (
            f"**Today's drafter is best**: `{found.best.name}` seemed faster on the questions for "
            f"tuning, but is {times} on the others. `{SETTINGS}` holds it all the same."
        )
    return f"**`{found.best.name}`** is {times}.{sure}"


def reporting_rows(found: Tuned) -> list[Row]:
    """Today's and the best drafter, decoded."""
    rows = []
    for name, summary in found.report.items():
        overall = summary["overall"]
        rows.append(
            {
                "drafter": name,
                "speedup": number(overall["speedup"]),
                "95%": ends(overall["speedup_ci95"]),
                "CR": number(overall["compression_rate"]),
                "accepted": share(overall["acceptance_rate"]),
                "tokens/s": number(overall["tokens_per_second"], 1),
            }
        )
    return rows


def prediction_words(found: Tuned) -> str:
    """Whether predictions held."""
    known = [one for one in found.confirmed if one.difference is not None]
    within = sum(abs(one.difference or 0) <= MOST for one in known)
    exact, decoded = found.exact
    text = (
        f"{within} of {len(known)} predictions are within {MOST:.0%} of what decoding gave on the "
        f"same questions. Of {decoded} texts that were decoded to be timed, {exact} had exactly "
        "the rounds of their replay: where all have, a difference is one of time alone."
    )
    for one in known:
        if abs(one.difference or 0) > MOST:
            text += f" {why_off(one)}"
    return text


def why_off(one: Confirmed) -> str:
    """What a prediction that is off differs in."""
    assert one.predicted is not None
    rates = one.predicted.compression_rate, one.measured["overall"]["compression_rate"]
    if abs(rates[0] / rates[1] - 1) > ALIKE:
        return f"`{one.name}` decoded in other rounds, as its CR shows."
    limits = one.measured["overall"]["speedup_ci95"]
    if limits is not None and limits[0] <= one.predicted.speedup <= limits[1]:
        return f"`{one.name}` is off, but within the interval of what was measured."
    return f"`{one.name}` had the predicted rounds; they took another time than those measured."


def prediction_row(one: Confirmed) -> Row:
    """A drafter that was decoded; CR is exact where replay is."""
    predicted, overall = one.predicted, one.measured["overall"]
    return {
        "drafter": one.name,
        "predicted": "-" if predicted is None else number(predicted.speedup),
        "measured": number(one.speedup),
        "95%": ends(overall["speedup_ci95"]),
        "difference": "-" if one.difference is None else f"{one.difference:+.1%}",
        "CR predicted": "-" if predicted is None else number(predicted.compression_rate, 3),
        "CR": number(overall["compression_rate"], 3),
    }


def score_row(one: Score) -> Row:
    """A setting as replay foresees it."""
    return {
        "setting": one.candidate.name,
        "speedup": number(one.speedup),
        "95%": ends(one.interval),
        "CR": number(one.compression_rate),
        "accepted": share(one.acceptance_rate),
    }


def source_row(one: Score, found: Tuned) -> Row:
    """The same, with its exit layer."""
    source = found.sources.get(one.candidate.source or "")
    exit_layer = "-" if source is None else str(source.drafter.exit_layer)
    return score_row(one) | {"exit layer": exit_layer}


def best_of_each(scores: Sequence[Score]) -> list[Score]:
    """The fastest of each drafter and source; `scores` has the fastest first."""
    best: dict[tuple[str, str | None], Score] = {}
    for one in scores:
        best.setdefault((one.candidate.kind, one.candidate.source), one)
    return list(best.values())


def task_words(found: Tuned) -> str:
    """What one choice for all tasks costs, against a choice for each."""
    best, one = best_by_task(found.scores), found.scores[0]
    seconds = sum(score.pairs_Q2[:, 1].sum() for score in best.values())
    lost = one.pairs_Q2[:, 1].sum() / seconds - 1
    return (
        f"With the best setting of each task decoding would take {seconds:.1f} s on the questions "
        f"for tuning; `{one.candidate.name}` for all takes {lost:.1%} more. (Predicted, and each "
        "task's best is chosen by few questions: take it as the most that a choice by task gives.)"
    )


def task_rows(found: Tuned) -> list[Row]:
    """The best setting of each task, and the best for all."""
    for_all = found.scores[0].by_task()
    return [
        {
            "task": NAMES.get(task, task),
            "questions": str(len(own.tasks)),
            "best setting": own.candidate.name,
            "speedup": number(own.speedup),
            "one for all": number(for_all[task].speedup),
        }
        for task, own in best_by_task(found.scores).items()
    ]


def cost_rows(found: Tuned) -> list[Row]:
    """What was measured of each drafter and source."""
    rows = []
    for (kind, source), own in found.costs.items():
        start, first, later, reading = (number(1e3 * part) for part in own.draft)
        verify = {
            f"verify {width}": number(1e3 * (seconds + own.context * costs.TYPICAL), 1)
            for width, seconds in zip(costs.KNOTS[:-1], own.verify, strict=False)
        }
        rows.append(
            {"drafter": kind if source is None else f"{kind}, {source}"}
            | {"round": start, "first token": first, "later token": later}
            | {"prompt token": reading}
            | verify
            | {"host": number(1e3 * own.host)}
            | {"prefill": number(1e3 * own.prefill[0], 1)}
            | {"a token": number(1e3 * own.prefill[1])}
        )
    return rows


def numbers(found: Tuned, config: TuneConfig) -> dict[str, Any]:
    """All numbers as JSON values, with where they come from."""
    return {
        "best": found.best.name,
        "gain": found.gain,
        "tuning": [question.question_id for question in found.split.tuning],
        "reporting": [question.question_id for question in found.split.reporting],
        "report": {name: summary["overall"] for name, summary in found.report.items()},
        "confirmed": [
            {
                "name": one.name,
                "predicted": one.predicted and one.predicted.speedup,
                "predicted_ci95": one.predicted and one.predicted.interval,
                "measured": one.measured["overall"],
                "difference": one.difference,
            }
            for one in found.confirmed
        ],
        "exact_turns": found.exact,
        "costs": [
            {"drafter": kind, "source": source} | asdict(own)
            for (kind, source), own in found.costs.items()
        ],
        "scores": [score_numbers(one) for one in found.scores],
        "seconds": found.seconds,
        "settings": {part.name: asdict(config)[part.name] for part in fields(TuneConfig)},
        "provenance": provenance(),
    }


def score_numbers(one: Score) -> dict[str, Any]:
    """A setting as replay foresees it."""
    return {
        "name": one.candidate.name,
        "drafter": one.candidate.kind,
        "source": one.candidate.source,
        "speedup": one.speedup,
        "compression_rate": one.compression_rate,
        "acceptance_rate": one.acceptance_rate,
        "by_task": {task: own.speedup for task, own in one.by_task().items()},
    }
