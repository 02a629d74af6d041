"""Reads conversations from files and `datasets`, and holds out some questions from training."""

import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from pyarrow import parquet

from kangaroo.data.filters import list_reasons
from kangaroo.models.prompts import Message, content_text, sanitized
from kangaroo.utils.errors import DataError, explained
from kangaroo.utils.folders import write_whole

QUESTION = "turns"  # the user's turns of a bench's question, as texts
COLUMNS = ("messages", "conversations", "conversation", QUESTION)
ROLES = {"system": "system", "user": "user", "human": "user"} | dict.fromkeys(
    ("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"
)
FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, ...]} or '
    '{"conversations": [{"from": "human", "value": "..."}, ...]}'
)
JSON = (".json", ".jsonl")
TABLES = (".parquet", ".csv", ".arrow")
HUB_FILE = "hf://datasets/"  # followed by owner/name/file
TRAINING = "training.jsonl"  # a file of a split
HELD_OUT = "held_out.jsonl"
SHARED = 20  # words of a passage; questions often have fewer words in common
SOURCES = (
    "a .json, .jsonl, .parquet, .csv or .arrow file, a folder of such files, a hub id, or "
    f"{HUB_FILE}owner/name/file"
)


@dataclass
class Source:
    """A source of conversations.

    Args:
        source: a .json or .jsonl file in ShareGPT or chat form, a file or folder that `datasets`
            reads, a dataset's id on the hub, or one file of it, `hf://datasets/owner/name/file`.
        subset, split, revision: those of a dataset on the hub or in a folder.
        column: the column with the conversation; None tries the usual names.
    """

    source: str = "???"
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str | None = None


Check = Callable[[list[Message]], None]  # raises `BadRecord`


class BadRecord(ValueError):
    """A record cannot be read for the reason in the message."""


def read(
    origin: Source,
    limit: int | None,
    unreadable: Counter[str] | None = None,
    check: Check | None = None,
) -> list[list[Message]]:
    """The first `limit` conversations of a source, unchanged. `unreadable` counts records that
    cannot be read or that `check` refuses, by reason; without it they are a `DataError`."""
    records = itertools.islice(read_records(origin, unreadable, check), limit)
    conversations = [messages for _, messages in records]
    if not conversations:
        reasons = f" ({list_reasons(unreadable)})" if unreadable else ""
        raise DataError(f"{origin.source} holds no conversations{reasons}.")
    return conversations


def read_records(
    origin: Source, unreadable: Counter[str] | None, check: Check | None = None
) -> Iterator[tuple[dict[str, Any], list[Message]]]:
    """Every record of a source, unchanged, and its conversation, otherwise like `read`."""
    for number, record in enumerate(records(origin), start=1):
        try:
            messages = conversation(record, origin.column)
            if check is not None:
                check(messages)
            yield record, messages
        except BadRecord as error:
            if unreadable is None:
                raise DataError(
                    f"{origin.source}, record {number}: {error}. A record looks like {FORMS}. "
                    "data.skip_bad=true (skip_bad=true of prepare split) leaves out what cannot "
                    "be read, and counts it."
                ) from error
            unreadable[str(error)] += 1


def alternating_turns(messages: list[Message]) -> tuple[list[Message], str]:
    """The longest beginning of alternating user and assistant turns, or of user turns if nobody has
    answered any, which may follow a system turn; and what is wrong with the next turn, if any."""
    usable = [m for m in messages[:1] if m["role"] == "system" and m["content"].strip()]
    turns = list(itertools.dropwhile(lambda m: m["role"] != "user", messages))
    if not turns:
        return usable, "no user turn"
    is_answered = any(turn["role"] == "assistant" for turn in turns)
    order = itertools.cycle(["user", "assistant"] if is_answered else ["user"])
    for turn, role in zip(turns, order, strict=False):
        if turn["role"] == "system":
            return usable, "system turn in the middle"
        if turn["role"] != role:
            return usable, f"two {turn['role']} turns in a row"
        if not turn["content"].strip():
            return usable, f"empty {role} turn"
        usable.append(turn)
    return usable, ""


def is_local(source: str) -> bool:
    """Whether a source is a file or folder of this machine, existing or not."""
    path = Path(source).expanduser()
    is_file_name = path.suffix in (*JSON, *TABLES) or path.is_absolute()
    return not source.startswith(HUB_FILE) and (is_file_name or path.exists())


def records(origin: Source, option: str = "data.source") -> Iterator[Any]:
    """Every record of a source as it is, with a `BadRecord` in place of a line that is not JSON.
    Errors: `DataError`, which names the `option` that gave the source."""
    revision = origin.revision
    part = f"(subset {origin.subset}, split {origin.split}, revision {revision})"
    problem = f"{option}={origin.source} {part} cannot be read"
    fix = f"Pass {SOURCES}; the hub needs a network, and a gated dataset needs `hf auth login`."
    with explained(DataError, problem, fix):  # the hub's own are OSErrors
        if origin.source.startswith(HUB_FILE):
            owner, name, file = [*origin.source.removeprefix(HUB_FILE).split("/", 2), "", ""][:3]
            file = hf_hub_download(f"{owner}/{name}", file, repo_type="dataset", revision=revision)
            origin = replace(origin, source=file)
        path = Path(origin.source).expanduser()
        if is_local(origin.source) and not path.exists():
            raise DataError(f"there is no source '{path}'. Pass {SOURCES}.")
        if path.suffix.lower() in JSON and path.is_file():
            return _from_json(path)
        return iter(_table(origin, path))


def _table(origin: Source, path: Path) -> Iterable[Any]:
    """The rows of a file, a folder or a dataset on the hub. Errors: `OSError`, `ValueError`."""
    if path.suffix.lower() == ".parquet" and path.is_file():  # `datasets` would copy it
        return parquet.read_table(path, partitioning=None).to_pylist()
    # here, since the import takes seconds
    from datasets import load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        if path.is_file():
            if path.suffix not in TABLES:
                raise ValueError(f"nothing reads files that end in '{path.suffix}'.")
            return load_dataset(path.suffix[1:], data_files=str(path), split="train")
        if (path / "state.json").is_file():
            return load_from_disk(path)
        name = str(path) if path.is_dir() else origin.source
        return load_dataset(name, origin.subset, split=origin.split, revision=origin.revision)
    except DatasetsError as error:
        raise ValueError(error) from error


def _from_json(path: Path) -> Iterator[Any]:
    """Records of a file that is one JSON list or has one JSON object per line; a `BadRecord` for a
    line that is not JSON. `datasets` would need all records to have the same fields."""
    with (
        explained(DataError, f"{path} is not JSON in UTF-8", "Convert it."),
        path.open(encoding="utf-8-sig") as file,
    ):
        start = next((line for line in file if line.strip()), "")
        file.seek(0)
        if start.lstrip().startswith("["):
            yield from json.load(file)
            return
        for line in filter(str.strip, file):
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield BadRecord("a line that is not JSON")


def conversation(record: Any, column: str | None = None) -> list[Message]:
    """The conversation in a record, where it may be JSON text; it begins with the record's `system`
    if it has no system turn of its own. Errors: `BadRecord`."""
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, dict):
        raise BadRecord(f"a {type(record).__name__}, not an object")
    # tables have null where a field is absent
    record = {name: value for name, value in record.items() if value is not None}
    name = next((name for name in ([column] if column else COLUMNS) if name in record), None)
    if name is None:
        raise BadRecord(
            f"no {repr(column) if column else 'conversation'} among its fields "
            f"({', '.join(record) or 'none'}); name the right one with data.column="
        )
    turns = record[name]
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"'{name}' is text, but not JSON") from error
    if not isinstance(turns, list):
        raise BadRecord(f"'{name}' is a {type(turns).__name__}, not a list of turns")
    if name == QUESTION:
        turns = [{"from": "user", "value": x} if isinstance(x, str) else x for x in turns]
    roles = []
    for turn in turns:  # before texts, which a turn that calls a tool does not have
        if not isinstance(turn, dict):
            raise BadRecord(f"a turn that is a {type(turn).__name__}, not an object")
        role = _first(turn, "role", "from")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRecord(f"a turn of role {role!r} (in 'role' or 'from')")
        roles.append(ROLES[role])
    try:
        texts = [sanitized(content_text(_first(turn, "content", "value"))) for turn in turns]
    except ValueError as error:
        raise BadRecord(f"a turn whose 'content' or 'value' {error}") from error
    messages = [Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)]
    for turn, message in zip(turns, messages, strict=True):
        if (weight := turn.get("weight")) not in (None, 0, 1):
            raise BadRecord(f"a turn whose 'weight' is {weight!r}, neither 0 nor 1")
        if weight == 0 and message["role"] == "assistant":
            message["weight"] = 0
    system = record.get("system", "")
    if not isinstance(system, str):
        raise BadRecord(f"'system' is a {type(system).__name__}, not text")
    if system and roles[:1] != ["system"]:
        messages.insert(0, Message(role="system", content=sanitized(system)))
    return messages


def _first(turn: dict[str, Any], *names: str) -> Any:
    """The value of the first of these fields that has one."""
    return next((turn[name] for name in names if turn.get(name) is not None), None)


@dataclass(frozen=True)
class Split:
    """Training records, held-out questions of a bench, and how many records were left out."""

    training: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    left_out: int  # since they share a passage with a held-out question

    def write(self, folder: Path) -> None:
        """Write both lists as files of JSON lines, valid UTF-8, whole or not at all."""
        for name, records in ((TRAINING, self.training), (HELD_OUT, self.held_out)):
            lines = (sanitized(json.dumps(record, ensure_ascii=False)) for record in records)
            write_whole(folder / name, "".join(f"{line}\n" for line in lines).encode())


def split(origin: Source, held: int, seed: int, unreadable: Counter[str] | None = None) -> Split:
    """Shuffle questions and hold out `held` of each task, which is a record's field `task` or
    `category`, or `all`. A question that shares a passage of `SHARED` words with a held-out one is
    left out. Errors: `DataError`, as in `read`, and for a task with at most `held` questions."""
    questions = []
    for record, messages in read_records(origin, unreadable):
        turns = [m["content"] for m in messages if m["role"] == "user" and m["content"].strip()]
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
        if turns:
            questions.append((record, turns, system))
    if not questions:
        raise DataError(f"{origin.source} holds no questions.")
    random.Random(seed).shuffle(questions)
    by_task = defaultdict(list)
    for question in questions:
        record = question[0]
        task = sanitized(str(record.get("task") or record.get("category") or "all"))
        by_task[task].append(question)
    for task, task_questions in by_task.items():
        if (count := len(task_questions)) <= held:
            raise DataError(
                f"task '{task}' of {origin.source} has {count} questions, and {held} were to "
                f"be held out. Pass held= below {count}, or a file that has more."
            )
    bench: list[dict[str, Any]] = []
    for task in sorted(by_task):
        for _, turns, system in by_task[task][:held]:
            texts = {"turns": turns, "system": system}
            bench.append({"question_id": len(bench), "category": task} | texts)
    passages = {passage for question in bench for passage in _passages(question["turns"])}
    rest = [question for task_questions in by_task.values() for question in task_questions[held:]]
    random.Random(seed).shuffle(rest)
    training = [record for record, turns, _ in rest if passages.isdisjoint(_passages(turns))]
    return Split(training, bench, len(rest) - len(training))


def _passages(turns: list[str]) -> set[tuple[str, ...]]:
    texts = [turn.split() for turn in turns]
    return {tuple(ws[i : i + SHARED]) for ws in texts for i in range(len(ws) - SHARED + 1)}
