"""Conversations that others wrote, in ShareGPT or chat form, from a file or any `datasets` id, and
a split of them into some to train on and some to measure on."""

import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from kangaroo.data.filters import list_reasons
from kangaroo.models.prompts import Message, content_text, sanitized
from kangaroo.utils.errors import DataError
from kangaroo.utils.folders import write_whole

QUESTION = "turns"  # of a bench's question: texts, all of them the user's
COLUMNS = ("messages", "conversations", "conversation", QUESTION)
ROLES = {"system": "system", "user": "user", "human": "user"} | dict.fromkeys(
    ("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"
)
FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, ...]} or '
    '{"conversations": [{"from": "human", "value": "..."}, ...]}'
)
JSON, TABLES = (".json", ".jsonl"), (".parquet", ".csv", ".arrow")
HUB_FILE = "hf://datasets/"  # followed by owner/name/file
TRAINING, HELD_OUT = "training.jsonl", "held_out.jsonl"  # what a split writes
SHARED = 20  # words in a row: passages that questions share, rather than words that ask
SOURCES = (
    "a .json, .jsonl, .parquet, .csv or .arrow file, a folder of such files, a hub id, or "
    f"{HUB_FILE}owner/name/file"
)


@dataclass
class Source:
    """Where conversations come from.

    Args:
        source: a .json or .jsonl file in ShareGPT or chat form, a file or folder that `datasets`
            reads, a dataset's id on the hub, or one file of it, `hf://datasets/owner/name/file`.
        subset, split, revision: of a dataset on the hub or in a folder.
        column: the column that holds the conversation; None finds the usual names.
    """

    source: str = "???"
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str | None = None


class BadRecord(ValueError):
    """A record that cannot be read, and why."""


def read(
    origin: Source, limit: int | None, left_out: Counter[str] | None = None
) -> list[list[Message]]:
    """The conversations of a source, at most `limit`, unchanged; `left_out` counts the records that
    cannot be read, by reason, and None refuses the first one. Errors: `DataError` says which."""
    records = itertools.islice(named_records(origin, left_out), limit)
    conversations = [messages for _, messages in records]
    if not conversations:
        reasons = f" ({list_reasons(left_out)})" if left_out else ""
        raise DataError(f"{origin.source} holds no conversations{reasons}.")
    return conversations


def named_records(
    origin: Source, left_out: Counter[str] | None = None
) -> Iterator[tuple[dict[str, Any], list[Message]]]:
    """Every record of a source as it is, and its conversation; otherwise as `read`."""
    for number, record in enumerate(_records(origin), start=1):
        try:
            messages = _conversation(record, origin.column)
        except BadRecord as error:
            if left_out is None:
                raise DataError(
                    f"{origin.source}, record {number}: {error}. A record looks like {FORMS}. "
                    "data.skip_bad=true (skip_bad=true of prepare split) leaves out what cannot "
                    "be read, and counts it."
                ) from error
            left_out[str(error)] += 1
        else:
            yield record, messages


def regular(messages: list[Message]) -> tuple[list[Message], str]:
    """The longest beginning in which, after a system turn, user and assistant take turns, the user
    first; and what is wrong with the turn that ends it, if one does."""
    usable = [m for m in messages[:1] if m["role"] == "system" and m["content"].strip()]
    turns = list(itertools.dropwhile(lambda m: m["role"] != "user", messages))
    if not turns:
        return usable, "no user turn"
    for turn, role in zip(turns, itertools.cycle(["user", "assistant"]), strict=False):
        if turn["role"] == "system":
            return usable, "system turn in the middle"
        if turn["role"] != role:
            return usable, f"two {turn['role']} turns in a row"
        if not turn["content"].strip():
            return usable, f"empty {role} turn"
        usable.append(turn)
    return usable, ""


def is_local(source: str) -> bool:
    """Whether a source is a file or folder of this machine, or by its name has to be one."""
    path = Path(source).expanduser()
    named = path.suffix in (*JSON, *TABLES) or path.is_absolute()
    return not source.startswith(HUB_FILE) and (named or path.exists())


def _records(origin: Source) -> Iterator[Any]:
    # imported where it is used: it takes seconds, which other commands need not wait for
    from datasets import load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        if origin.source.startswith(HUB_FILE):
            owner, name, file = [*origin.source.removeprefix(HUB_FILE).split("/", 2), "", ""][:3]
            fetched = hf_hub_download(
                f"{owner}/{name}", file, repo_type="dataset", revision=origin.revision
            )
            origin = replace(origin, source=fetched)
        path = Path(origin.source).expanduser()
        if path.suffix in JSON and path.is_file():
            return _from_json(path)
        if is_local(origin.source) and not path.exists():
            raise DataError(f"there is no '{path}'. Pass data.source= {SOURCES}.")
        if path.is_file():
            if path.suffix not in TABLES:
                raise ValueError(f"nothing reads files that end in '{path.suffix}'.")
            kind, files = path.suffix.removeprefix("."), str(path)
            table: Iterable[Any] = load_dataset(kind, data_files=files, split="train")
        elif (path / "state.json").is_file():
            table = load_from_disk(path)
        else:
            name = str(path) if path.is_dir() else origin.source
            options = {"split": origin.split, "revision": origin.revision}
            table = load_dataset(name, origin.subset, **options)
        return iter(table)
    except (OSError, ValueError, DatasetsError) as error:  # the hub's own errors are OSErrors
        raise DataError(
            f"data.source={origin.source} (subset {origin.subset}, split {origin.split}, revision "
            f"{origin.revision}) cannot be read: {error} Pass {SOURCES}; the hub needs a network, "
            "and a gated dataset needs `hf auth login`."
        ) from error


def _from_json(path: Path) -> Iterator[Any]:
    """Records of a file that is one JSON list, or has one JSON object per line; of a line that is
    not JSON a `BadRecord`. Not by `datasets`, which wants all records alike."""
    try:
        with path.open(encoding="utf-8-sig") as file:
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
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); convert it.") from error
    except (ValueError, RecursionError) as error:  # too many digits, too many brackets
        raise DataError(f"{path} is not JSON: {error}.") from error


def _conversation(record: Any, column: str | None) -> list[Message]:
    """The conversation in a record; a cell of a table may hold it as JSON text."""
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, dict):
        raise BadRecord(f"a {type(record).__name__}, not an object")
    # a table, or a file of several kinds of records, has null where a field is absent
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
    for turn in turns:  # before texts: a turn that calls a tool has none
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
    return [Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)]


def _first(turn: dict[str, Any], *names: str) -> Any:
    """The first of a turn's fields that has a value: tables have null where one is absent."""
    return next((turn[name] for name in names if turn.get(name) is not None), None)


@dataclass(frozen=True)
class Split:
    """Two lists with no question in common: records as their source has them, and questions of a
    bench; and how many questions are in neither, since they share a passage with the second."""

    training: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    left_out: int

    def write(self, folder: Path) -> None:
        """Both as files of JSON lines, whole or not at all; `sanitized`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, records in ((TRAINING, self.training), (HELD_OUT, self.held_out)):
            lines = (sanitized(json.dumps(record, ensure_ascii=False)) for record in records)
            write_whole(folder / name, "".join(f"{line}\n" for line in lines).encode())


def split(origin: Source, held: int, seed: int, left_out: Counter[str] | None = None) -> Split:
    """Shuffle questions and hold some out of each task: a record's field `task` or `category`, or
    `all`. One that shares a passage, `SHARED` words in a row, with one that is held out is in
    neither list. Errors: `DataError`, as `read`, and for a task with at most `held` questions."""
    questions = []
    for record, messages in named_records(origin, left_out):
        turns = [m["content"] for m in messages if m["role"] == "user" and m["content"].strip()]
        if turns:
            questions.append((record, turns))
    if not questions:
        raise DataError(f"{origin.source} holds no questions.")
    random.Random(seed).shuffle(questions)
    by_task = defaultdict(list)
    for record, turns in questions:
        task = sanitized(str(record.get("task") or record.get("category") or "all"))
        by_task[task].append((record, turns))
    for task, some in by_task.items():
        if len(some) <= held:
            raise DataError(
                f"task '{task}' of {origin.source} has {len(some)} questions, and {held} were to "
                f"be held out. Pass held= below {len(some)}, or a file that has more."
            )
    held_out = [(task, turns) for task in sorted(by_task) for _, turns in by_task[task][:held]]
    passages = {run for _, turns in held_out for run in _runs(turns)}
    rest = [item for some in by_task.values() for item in some[held:]]
    random.Random(seed).shuffle(rest)
    training = [record for record, turns in rest if passages.isdisjoint(_runs(turns))]
    bench = [
        {"question_id": number, "category": task, "turns": turns}
        for number, (task, turns) in enumerate(held_out)
    ]
    return Split(training, bench, len(rest) - len(training))


def _runs(turns: list[str]) -> set[tuple[str, ...]]:
    texts = [turn.split() for turn in turns]
    return {tuple(ws[i : i + SHARED]) for ws in texts for i in range(len(ws) - SHARED + 1)}
