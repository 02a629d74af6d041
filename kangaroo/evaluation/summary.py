"""From records to `summary.json`, of a method and of the baselines beside it."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kangaroo.engine.sampling import Rule
from kangaroo.evaluation.metrics import has, metrics, paired_seconds, runs
from kangaroo.evaluation.records import METHOD, SUMMARY, Baseline, MethodRun, Record, begun, read
from kangaroo.utils.folders import write_json


def summarise(records: Sequence[Record], about: dict[str, Any]) -> dict[str, Any]:
    """All metrics of a run, overall and by group; `about` is what `records.begun` returns.

    `drafter_cost` is what the method adds to the target: `parameters`, `bytes` (the most that it
    held after any question) and `training`.
    """
    settings = about["settings"]
    tasks = dict.fromkeys(record.task for record in records)
    by_task = {task: [record for record in records if record.task == task] for task in tasks}
    return {
        **{name: settings[name] for name in ("model", "drafter", "bench", "dtype", "device")},
        "questions": len(records),
        "overall": metrics(records),
        "by_task": {task: metrics(part) for task, part in by_task.items()},
        "by_length": {length: metrics(part) for length, part in by_length(records).items()},
        "lossless": lossless(records, settings),
        "drafter_cost": about["drafter_cost"]
        | {"bytes": max(record.drafter_bytes for record in records)},
        "settings": settings,
        "provenance": about["provenance"],
        "by_question": [of_question(record) for record in records],
    }


def by_length(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by the length of prompts in tokens, 1k, 2k, 4k, ..., whichever is nearest by ratio;
    of a question those turns whose prompts are so long. Empty where not two of these occur."""

    def power(length: int) -> int:
        return max(-1, round(math.log2(length / 1024)))

    powers = sorted({power(turn.prompt_tokens) for record in records for turn in record.turns})
    if sum(each >= 0 for each in powers) < 2:
        return {}
    return {
        "shorter" if each < 0 else f"{2**each}k": [
            replace(record, turns=turns)
            for record in records
            if (turns := [turn for turn in record.turns if power(turn.prompt_tokens) == each])
        ]
        for each in powers
    }


def of_question(record: Record) -> dict[str, Any]:
    """What comparisons in pairs read: seconds of a question, for as many tokens of both."""
    vanilla, method = paired_seconds(record) if has(record, "vanilla") else (None, None)
    seconds = {"vanilla_paired_seconds": vanilla, "paired_seconds": method}
    return {"question_id": record.question_id, "task": record.task} | seconds


def lossless(records: Sequence[Record], settings: dict[str, Any]) -> dict[str, Any]:
    """How many turns are vanilla's token for token, and every fork. `identical` is None where that
    is not to be expected (no vanilla, another rule), `hf_identical` under sampling: other noise."""
    greedy = settings["sampling.temperature"] == 0
    comparable = greedy or settings["sampling.rule"] == Rule.match.value
    method, vanilla, hf = (runs(records, name) for name in (METHOD, "vanilla", "hf"))
    beside_hf = runs([record for record in records if has(record, "hf")], "vanilla")

    def equal(texts: Sequence[MethodRun], others: Sequence[MethodRun]) -> int:
        return sum(a.tokens == b.tokens for a, b in zip(texts, others, strict=True))

    return {
        "turns": len(method),
        "identical": equal(method, vanilla) if comparable and vanilla else None,
        "hf_turns": len(hf),
        "hf_identical": equal(hf, beside_hf) if greedy and hf and vanilla else None,
        "forks": [
            {"question_id": record.question_id, "turn": number} | asdict(turn.fork)
            for record in records
            for number, turn in enumerate(record.turns)
            if turn.fork is not None
        ],
    }


def shared(about: dict[str, Any]) -> dict[str, Any]:
    """Settings that methods must have in common: all but the drafter's."""
    return {k: v for k, v in about["settings"].items() if k.split(".")[0] != "drafter"}


def write_baseline(baseline: Baseline, method: Path, output: Path) -> None:
    """A baseline's own `summary.json`, as of a method measured against itself, from a method's
    records."""
    records = [record for record in read(method) if has(record, baseline.name)]
    for record in records:
        record.drafter_bytes = 0
        for turn in record.turns:
            turn.runs[METHOD], turn.fork = turn.runs[baseline.name], None
    about = begun(method)
    about["settings"] = shared(about) | {"drafter": baseline.value}
    about["drafter_cost"] = {"parameters": 0, "training": {}}
    folder = output / baseline.value
    folder.mkdir(exist_ok=True)
    write_json(folder / SUMMARY, summarise(records, about))
