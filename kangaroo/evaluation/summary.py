"""From records to result files: `summary.json`, and the answers in Spec-Bench's schema."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kangaroo.evaluation.bench import task_of
from kangaroo.evaluation.metrics import metrics, runs
from kangaroo.evaluation.records import METHOD, SUMMARY, Record, Run, write_json
from kangaroo.sampling import Rule


def summarise(records: Sequence[Record], about: dict[str, Any]) -> dict[str, Any]:
    """All metrics of a run, overall and by task.

    Args:
        about: what `records.begun` returns; its settings name model, drafter, bench, dtype, device.

    `lossless` counts turns whose text is vanilla's token for token; `identical` is None where that
    is not to be expected (no vanilla, or rejection sampling). `hf_identical` counts turns in which
    transformers wrote vanilla's text: None under sampling, where its noise is another.

    `drafter_cost` is what the method adds to the target: `parameters`, `bytes` (the most that it
    held after any question, see `footprint`) and `training` (`DrafterConfig.made_by`).
    """
    settings = about["settings"]
    by_task: dict[str, list[Record]] = {}
    for record in records:
        by_task.setdefault(task_of(record.category), []).append(record)
    names = ("model", "drafter", "bench", "dtype", "device")
    return {
        **{name: settings[name] for name in names},
        "questions": len(records),
        "overall": metrics(records),
        "by_task": {task: metrics(some) for task, some in by_task.items()},
        "lossless": lossless(records, settings),
        "drafter_cost": about["drafter_cost"]
        | {"bytes": max(record.drafter_bytes for record in records)},
        "settings": settings,
        "provenance": about["provenance"],
    }


def lossless(records: Sequence[Record], settings: dict[str, Any]) -> dict[str, Any]:
    """How many texts are vanilla's, and every fork."""
    greedy = settings["sampling.temperature"] == 0
    comparable = greedy or settings["sampling.rule"] == Rule.match.value
    method, vanilla, hf = (runs(records, name) for name in (METHOD, "vanilla", "hf"))
    return {
        "turns": len(method),
        "identical": equal(method, vanilla) if comparable and vanilla else None,
        "hf_identical": equal(hf, vanilla) if greedy and hf and vanilla else None,
        "forks": [
            {
                "question_id": record.question_id,
                "turn": number,
                "position": turn.fork.position,
                "gap": turn.fork.gap,
                "label": turn.fork.label,
            }
            for record in records
            for number, turn in enumerate(record.turns)
            if turn.fork is not None
        ],
    }


def equal(some: Sequence[Run], others: Sequence[Run]) -> int:
    """How many turns have the same tokens."""
    return sum(a.tokens == b.tokens for a, b in zip(some, others, strict=True))


def answer(record: Record, name: str, model_id: str) -> dict[str, Any]:
    """One question as a line of Spec-Bench's answer files.

    `accept_lengths` has an entry a verification: accepted draft tokens + 1, so 1 for each of
    vanilla's tokens. Turn by turn their sum is `new_tokens`, or one more where an EOS or the limit
    cut the bonus token off.
    """
    some = runs([record], name)
    choice = {
        "index": 0,
        "turns": [run.text for run in some],
        "decoding_steps": [len(run.emitted) or len(run.tokens) for run in some],
        "new_tokens": [len(run.tokens) for run in some],
        "wall_time": [run.seconds for run in some],
        "accept_lengths": [
            count + 1 for run in some for count in run.accepted or [0] * len(run.tokens)
        ],
    }
    return {
        "question_id": record.question_id,
        "category": record.category,
        "answer_id": uuid.uuid5(uuid.NAMESPACE_URL, f"{model_id}/{record.question_id}").hex,
        "model_id": model_id,
        "choices": [choice],
        "tstamp": record.finished,
    }


def write_answers(records: Sequence[Record], name: str, model_id: str, file: Path) -> None:
    """All answers of one method, by question id."""
    lines = [json.dumps(answer(record, name, model_id)) for record in records]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write(records: Sequence[Record], summary: dict[str, Any], folder: Path) -> None:
    """`answers.jsonl`, `baseline.jsonl` (vanilla's, where it ran) and `summary.json`."""
    model, drafter = summary["model"], summary["drafter"]
    write_answers(records, METHOD, f"{model}-{drafter}", folder / "answers.jsonl")
    if runs(records, "vanilla"):
        write_answers(records, "vanilla", f"{model}-vanilla", folder / "baseline.jsonl")
    write_json(folder / SUMMARY, summary)
