"""Records of an evaluation: a line of JSON for each question, in one file for each rank."""

import json
import os
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from kangaroo.utils.errors import CorruptFile, explained
from kangaroo.utils.folders import write_json
from kangaroo.utils.provenance import check_same, provenance

METHOD = "method"  # the drafter under test, beside the baselines "vanilla" and "hf"
AGAIN = "vanilla_again"  # a method: vanilla decoding a second time, which shows the noise
RUN = "run.json"
RECORDS = "records-*.jsonl"
SUMMARY = "summary.json"


class Baseline(Enum):
    """What methods are timed against. Names are for records, values for folders and tables."""

    vanilla = "vanilla"  # the same engine without drafts
    hf = "transformers"  # its `generate`


@dataclass
class MethodRun:
    """One method's answer to one turn.

    Args:
        tokens: the new tokens, with the EOS; `text` is without special tokens.
        finish: "eos" or "length".
        retokenised: length of `text` when it is tokenized again, with BOS: Spec-Bench counts so.
        seconds: wall clock from the prompt's ids to the last token: allocation, prefill, all steps.
        emitted, accepted, drafted: tokens of each round; the first round is the prefill.
        draft_seconds, verify_seconds, host_seconds: seconds of each round, 0 for the prefill.
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

    position: int  # index of the first new token that differs
    # best score less the two tokens' lower one; None if a text ended or a filter removed a token
    gap: float | None
    label: str  # "near-tie" if rounding explains the fork, else "bug"


@dataclass
class Turn:
    """One turn with the answers of a method and the baselines, all to the same prompt."""

    prompt_tokens: int
    max_new_tokens: int  # at most what the prompt leaves of the context
    runs: dict[str, MethodRun]  # keys: `METHOD` and names of baselines
    fork: Fork | None  # None if method and vanilla agree, or need not


@dataclass
class Record:
    """One question, answered."""

    question_id: int
    category: str
    turns: list[Turn]
    finished: float  # Unix time
    drafter_bytes: int = 0  # memory of the drafter afterwards, see `footprint`
    task: str = ""  # the group it is reported under
    load: float = 0.0  # processes that ran or waited in the last minute, per processor


def append(record: Record, folder: Path, rank: int = 0) -> None:
    """Append a record to a rank's file."""
    append_line(folder / RECORDS.replace("*", str(rank)), asdict(record))


def append_line(file: Path, fields: dict[str, Any]) -> None:
    """Append a line of JSON, which survives a kill -9 and a power cut."""
    with file.open("ab+") as stream:
        stream.seek(max(stream.tell() - 1, 0))
        if stream.read() not in (b"", b"\n"):  # a killed run has cut the last line short
            stream.truncate(len(whole_lines(file)))
        stream.write(json.dumps(fields).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def read(folder: Path) -> list[Record]:
    """All ranks' records, sorted by question id, without a line cut short at a file's end. Errors:
    `CorruptFile` for a line that is no record."""
    records = {}
    for file in sorted(folder.glob(RECORDS)):
        for number, line in enumerate(whole_lines(file).splitlines(), start=1):
            problem = f"'{file}', line {number} is no record"
            fix = "Delete that line, and what it held is measured again."
            with explained(CorruptFile, problem, fix):
                record = _record(json.loads(line))
            records[record.question_id] = record
    return [records[question_id] for question_id in sorted(records)]


def check_run(folder: Path, settings: dict[str, Any]) -> None:
    """Check that the run in a folder had these settings. Errors: `ConfigError`; `CorruptFile`."""
    before = read_run(folder)["settings"]
    now = json.loads(json.dumps(settings))
    check_same(folder, {name: before.get(name) for name in now}, now, "resume=false, or output=")


def start_run(folder: Path, settings: dict[str, Any], cost: dict[str, Any], resume: bool) -> None:
    """Start a run in `folder`, or resume the one there. Errors: those of `check_run`."""
    if resume and (folder / RUN).is_file():
        check_run(folder, settings)
        return
    for file in (*folder.glob(RECORDS), folder / SUMMARY):
        file.unlink(missing_ok=True)
    run = {"settings": settings, "drafter_cost": cost, "provenance": provenance()}
    write_json(folder / RUN, run)


def read_run(folder: Path) -> dict[str, Any]:
    """Settings, drafter's cost and provenance of a run, as `start_run` wrote them."""
    with explained(CorruptFile, f"'{folder / RUN}'", "Pass resume=false to begin anew."):
        run = json.loads((folder / RUN).read_text())
        return {name: run[name] for name in ("settings", "drafter_cost", "provenance")}


def whole_lines(file: Path) -> bytes:
    """A file's content, without a line cut short at its end."""
    content = file.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _record(fields: dict[str, Any]) -> Record:
    for turn in fields["turns"]:
        turn["runs"] = {name: MethodRun(**run) for name, run in turn["runs"].items()}
        turn["fork"] = turn["fork"] and Fork(**turn["fork"])
    return Record(**(fields | {"turns": [Turn(**turn) for turn in fields["turns"]]}))
