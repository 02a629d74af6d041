"""Benches: questions in Spec-Bench's format, shipped, downloaded once, or from a local file."""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import urllib.request
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kangaroo.errors import ConfigError, CorruptFile, DataError
from kangaroo.folders import cache_folder
from kangaroo.prompts import whole
from kangaroo.ranges import Count, Ranged

log = logging.getLogger(__name__)

MTBENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


@dataclass
class BenchConfig(Ranged):
    """Where questions come from: `path` where it is given, else `url`, else the package itself.

    Args:
        name: names the bench in results; without `path` and `url`, that of a shipped file.
        path: a local file, one JSON object a line.
        url: downloaded once into the cache folder (`$KANGAROO_CACHE`, else the platform's).
        sha256: what the downloaded file must have; a `path` that differs is used with a warning.
        max_new_tokens: the longest answer to a turn, in tokens.
    """

    name: str = "demo"
    path: str | None = None
    url: str | None = None
    sha256: str | None = None
    max_new_tokens: Count = 1024


@dataclass
class Question:
    """Turns of a user; the method under test answers each before it sees the next.

    Args:
        reference: answers, one a turn, where the bench has them; nothing here reads them.
    """

    question_id: int
    category: str
    turns: list[str]
    reference: list[str] | None = None


def task_of(category: str) -> str:
    """The task a category is reported under: MT-bench's eight are one, the others themselves."""
    return "mt_bench" if category in MTBENCH else category


def load_questions(config: BenchConfig) -> list[Question]:
    """The bench's questions in the order of its file.

    Errors: `DataError` for a file that is missing, cannot be downloaded or is malformed,
    `CorruptFile` for a wrong checksum, `ConfigError` where no such bench is shipped.
    """
    if config.path is not None:
        content = _local(config, Path(config.path))
        return parse(content, config.path)
    if config.url is not None:
        file = cache_folder() / "benches" / f"{config.name}.jsonl"
        return parse(_cached(config, config.url, file), str(file))
    shipped = resources.files(__package__) / "benches"
    if not (shipped / f"{config.name}.jsonl").is_file():
        names = sorted(entry.name for entry in shipped.iterdir() if entry.name.endswith(".jsonl"))
        raise ConfigError(
            f"no bench '{config.name}' is shipped (there is {', '.join(names)}); pass bench.path= "
            "or bench.url=."
        )
    return parse((shipped / f"{config.name}.jsonl").read_bytes(), f"{config.name}.jsonl")


def fingerprint(questions: list[Question]) -> str:
    """Hash of what is asked, in order."""
    asked = json.dumps([asdict(question) for question in questions])
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def _local(config: BenchConfig, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"bench.path={path} cannot be read: {error.strerror}.") from error
    if config.sha256 and hashlib.sha256(content).hexdigest() != config.sha256:
        log.warning("%s does not hold the questions of %s (its sha256 differs)", path, config.name)
    return content


def _cached(config: BenchConfig, url: str, file: Path) -> bytes:
    if file.is_file():
        content = file.read_bytes()
        _check(config, content, f"'{file}'", "Delete it, so that it is downloaded again")
        return content
    content = _download(url)
    _check(config, content, url, "Try again, or check what stands between you and that address")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")  # ranks may download at the same time
    partial.write_bytes(content)
    os.replace(partial, file)
    return content


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return response.read()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{url} cannot be downloaded ({error}). Go online once, or fetch the file elsewhere "
            "and pass bench.path=."
        ) from error


def _check(config: BenchConfig, content: bytes, where: str, fix: str) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if config.sha256 and digest != config.sha256:
        raise CorruptFile(
            f"the questions of {config.name} from {where} have sha256 {digest}, not "
            f"{config.sha256}. {fix}, or pass bench.path=."
        )


def parse(content: bytes, where: str) -> list[Question]:
    """Questions from JSON lines; `DataError` names the line that is none."""
    questions: dict[int, Question] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            question = _question(json.loads(line))
        except ValueError as error:
            raise DataError(f"{where}, line {number}: {error}.") from error
        if question.question_id in questions:
            raise DataError(f"{where}, line {number}: question_id {question.question_id} again.")
        questions[question.question_id] = question
    if not questions:
        raise DataError(f"{where} holds no questions.")
    return list(questions.values())


def _question(fields: Any) -> Question:
    if not isinstance(fields, dict):
        raise ValueError("a question is a JSON object")
    whole(json.dumps(fields, ensure_ascii=False))
    if type(fields.get("question_id")) is not int:
        raise ValueError("question_id must be an integer")
    if not isinstance(fields.get("category"), str):
        raise ValueError("category must be a string")
    turns = fields.get("turns")
    if not turns or not isinstance(turns, list):
        raise ValueError("turns must be a list of at least one string")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("every turn must be a string that is not blank")
    return Question(fields["question_id"], fields["category"], turns, fields.get("reference"))
