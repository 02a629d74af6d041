"""What an evaluation keeps of each question: a line of JSON, at once on disk, a file a rank."""

import json
import os
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from kangaroo.evaluation.bench import task_of
from kangaroo.utils.errors import ConfigError, CorruptFile
from kangaroo.utils.folders import write_json
from kangaroo.utils.provenance import differences, provenance

METHOD = "method"  # the drafter under test, beside the baselines "vanilla" and "hf"
AGAIN = "vanilla_again"  # a method: vanilla decoding a second time, to see what noise does
RUN, RECORDS, SUMMARY = "run.json", "records-*.jsonl", "summary.json"


class Baseline(Enum):
    """What methods are timed against, by what records call it: what it is called as a method."""

    vanilla = "vanilla"  # the same engine, proposing nothing
    hf = "transformers"  # its `generate`


@dataclass
class MethodRun:
    """One method's answer to one turn.

    Args:
        tokens: what it wrote, EOS included; `text` is without special tokens.
        finish: "eos" or "length".
        retokenised: tokens of `text`, with those that the tokenizer adds: Spec-Bench counts a
            baseline by them.
        seconds: wall clock from the prompt's ids to the last token: allocation, prefill, all steps.
        emitted, accepted, drafted: tokens of each round, the prefill's first.
        draft_seconds, verify_seconds, host_seconds: time of each; 0 for the prefill's.
    """

    tokens: list[int]
    text: str
    finish: str
    retokenised: int
    seconds: float
    emitted: list[int]
    accepted: list[int]
    drafted: list[int]
    draft_seconds: list[float]
    verify_seconds: list[float]
    host_seconds: list[float]


@dataclass
class Fork:
    """Where a method's text leaves vanilla's."""

    position: int  # of the first token that differs, among the turn's new ones
    # how far the lower of the two tokens lies below the best score, by teacher forcing; None where
    # a text ends too early or a filter removed the token
    gap: float | None
    label: str  # "near-tie" where rounding explains the fork, else "bug"


@dataclass
class Turn:
    """One turn as every method answered it, all from the same prompt."""

    prompt_tokens: int
    max_new_tokens: int  # after the cap by the room that the prompt leaves in the context
    runs: dict[str, MethodRun]  # by name: the method and its baselines
    fork: Fork | None  # None where method and vanilla agree, or are not expected to


@dataclass
class Record:
    """One question, answered."""

    question_id: int
    category: str
    turns: list[Turn]
    finished: float  # Unix time
    drafter_bytes: int = 0  # that the method then held beyond the target, see `footprint`
    task: str = ""  # what it is reported under

    def __post_init__(self) -> None:
        self.task = self.task or task_of(self.category)  # earlier records do not say it


class Writer:
    """Appends records to a rank's file; what was written survives a kill -9 and a power cut."""

    def __init__(self, folder: Path, rank: int = 0):
        file = folder / RECORDS.replace("*", str(rank))
        self.stream = file.open("ab")
        self.stream.truncate(len(_whole_lines(file)))  # a line that a killed run left unfinished

    def append(self, record: Any) -> None:
        """Write one record, a dataclass, whole or not at all."""
        self.stream.write(json.dumps(asdict(record)).encode() + b"\n")
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def close(self) -> None:
        self.stream.close()


def read(folder: Path) -> list[Record]:
    """All ranks' records by question id; a line cut short at the end is left out. Errors:
    `CorruptFile` for a line that is no record."""
    records = {}
    for file in sorted(folder.glob(RECORDS)):
        for number, line in enumerate(_whole_lines(file).splitlines(), start=1):
            try:
                record = _record(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CorruptFile(
                    f"'{file}', line {number} is no record ({error}). Delete that line, and what "
                    "it held is measured again."
                ) from error
            records[record.question_id] = record
    return [records[question_id] for question_id in sorted(records)]


def enter(
    folder: Path, settings: dict[str, Any], drafter_cost: dict[str, Any], resume: bool
) -> None:
    """Make `folder` this run's, or go on with the run that it holds. Errors: `ConfigError` names
    the settings that differ."""
    file = folder / RUN
    if resume and file.is_file():
        if difference := differences(begun(folder)["settings"], json.loads(json.dumps(settings))):
            raise ConfigError(
                f"'{folder}' holds a run with other settings: {difference}. Pass another "
                "output=, or resume=false to measure again from the start."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob(RECORDS), folder / SUMMARY):
        old.unlink(missing_ok=True)
    about = {"settings": settings, "drafter_cost": drafter_cost, "provenance": provenance()}
    write_json(file, about)


def begun(folder: Path) -> dict[str, Any]:
    """What `enter` wrote when the run of `folder` began, with its provenance."""
    return json.loads((folder / RUN).read_text())


def _whole_lines(file: Path) -> bytes:
    content = file.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _record(fields: dict[str, Any]) -> Record:
    for turn in fields["turns"]:
        turn["runs"] = {name: MethodRun(**run) for name, run in turn["runs"].items()}
        turn["fork"] = turn["fork"] and Fork(**turn["fork"])
    return Record(**(fields | {"turns": [Turn(**turn) for turn in fields["turns"]]}))
