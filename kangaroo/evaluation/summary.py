"""Turns records into `summary.json`, for a method and for its baselines."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from kangaroo.engine.sampling import Rule
from kangaroo.evaluation.metrics import metrics, paired_seconds
from kangaroo.evaluation.records import METHOD, SUMMARY, Baseline, Record, Turn, read, read_run
from kangaroo.utils.folders import write_json


def summarise(records: Sequence[Record], run: dict[str, Any]) -> dict[str, Any]:
    """All metrics, overall and by group; `run` is what `records.read_run` returns. Of the drafter's
    cost, `bytes` are the most that it held after any question."""
    settings = run["settings"]
    tasks = dict.fromkeys(record.task for record in records)
    ends = by_trait(records, lambda turn: turn.runs[METHOD].finish)
    return {
        **{name: settings[name] for name in ("model", "drafter", "bench", "dtype", "device")},
        "questions": len(records),
        "overall": metrics(records),
        "by_task": {task: metrics([x for x in records if x.task == task]) for task in tasks},
        "by_length": {length: metrics(part) for length, part in by_length(records).items()},
        "by_end": {end: metrics(part) for end, part in ends.items() if len(ends) > 1},
        "lossless": lossless(records, settings),
        "drafter_cost": run["drafter_cost"] | {"bytes": max(x.drafter_bytes for x in records)},
        "settings": settings,
        "provenance": run["provenance"],
        "by_question": [question_seconds(record) for record in records],
    }


def by_trait(records: Sequence[Record], trait: Callable[[Turn], Any]) -> dict[Any, list[Record]]:
    """Records by a trait of turns; a question has in each group the turns that belong there."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        for value, turns in groupby(sorted(record.turns, key=trait), trait):
            groups.setdefault(value, []).append(replace(record, turns=list(turns)))
    return dict(sorted(groups.items()))


def by_length(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by the prompt length, of 1k, 2k, 4k, ..., that is nearest by ratio; empty unless two
    of these occur."""
    powers = by_trait(records, lambda x: max(-1, round(math.log2(x.prompt_tokens / 1024))))
    if sum(p >= 0 for p in powers) < 2:
        return {}
    return {"shorter" if p < 0 else f"{2**p}k": part for p, part in powers.items()}


def question_seconds(record: Record) -> dict[str, Any]:
    """A question's seconds by vanilla and by the method, for `comparison.compare_pair`."""
    vanilla, method = paired_seconds(record) if "vanilla" in record.turns[0].runs else (None, None)
    seconds = {"vanilla_paired_seconds": vanilla, "paired_seconds": method}
    return {"question_id": record.question_id, "task": record.task} | seconds


def lossless(records: Sequence[Record], settings: dict[str, Any]) -> dict[str, Any]:
    """How many turns are vanilla's token for token, and all forks. `identical` is None without
    vanilla and under the rejection rule, `hf_identical` also if hf samples by its own noise."""
    greedy = settings["sampling.temperature"] == 0
    comparable = greedy or settings["sampling.rule"] == Rule.match.value
    turns = [turn.runs for record in records for turn in record.turns]

    def identical(name: str, expected: bool) -> int | None:
        pairs = [(x[name], x["vanilla"]) for x in turns if name in x and "vanilla" in x]
        return sum(a.tokens == b.tokens for a, b in pairs) if expected and pairs else None

    return {
        "turns": len(turns),
        "identical": identical(METHOD, comparable),
        "hf_turns": sum("hf" in x for x in turns),
        "hf_identical": identical("hf", greedy),
        "forks": [
            {"question_id": record.question_id, "turn": number} | asdict(turn.fork)
            for record in records
            for number, turn in enumerate(record.turns, start=1)
            if turn.fork is not None
        ],
    }


def shared_settings(run: dict[str, Any], free: Collection[str | None] = ()) -> dict[str, Any]:
    """The settings that runs must have in common: all but the drafter's and the `free` ones."""
    settings = run["settings"].items()
    return {k: v for k, v in settings if k.split(".")[0] != "drafter" and k not in free}


def write_baseline(baseline: Baseline, method: Path, output: Path) -> None:
    """Write a baseline's own `summary.json` below `output`, from the records of a method."""
    records = [record for record in read(method) if baseline.name in record.turns[0].runs]
    for record in records:
        record.drafter_bytes = 0
        for turn in record.turns:
            turn.runs[METHOD] = turn.runs[baseline.name]
            turn.fork = None
    run = read_run(method)
    run["settings"] = shared_settings(run) | {"drafter": baseline.value}
    run["drafter_cost"] = {"parameters": 0, "training": {}}
    write_json(output / baseline.value / SUMMARY, summarise(records, run))
