"""Conversations that others wrote: ShareGPT or chat form, from a file or any `datasets` id."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from kangaroo.errors import DataError
from kangaroo.prompts import Message, mended

QUESTION = "turns"  # of a bench's question: texts, all of them the user's
COLUMNS = ("messages", "conversations", "conversation", QUESTION)
ROLES = {"system": "system", "user": "user", "human": "user"} | dict.fromkeys(
    ("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"
)
FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, ...]} or '
    '{"conversations": [{"from": "human", "value": "..."}, ...]}'
)
LOADERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
HUB_FILE = "hf://datasets/"  # followed by owner/name/file
SOURCES = (
    "a .json, .jsonl, .parquet, .csv or .arrow file, a folder of such files, a hub id, or "
    f"{HUB_FILE}owner/name/file"
)


@dataclass
class Source:
    """Where conversations come from.

    Args:
        path: a .json or .jsonl file, one that `datasets` reads, a folder, an id on the hub, or one
            file there, `hf://datasets/owner/name/file`.
        subset, split, revision: of a dataset on the hub or in a folder.
        column: the column that holds the conversation; None takes "messages", "conversations",
            "conversation", or the "turns" of a bench's question, of which the first is read.
    """

    path: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str | None = None


def read(source: Source, limit: int | None) -> list[list[Message]]:
    """The conversations of a source, at most `limit`, unchanged.

    Errors: `DataError` says which record is malformed and what is expected, or why the source
    cannot be read.
    """
    found = itertools.islice(named_records(source), limit)
    conversations = [messages for _, messages in found]
    if not conversations:
        raise DataError(f"{source.path} holds no conversations.")
    return conversations


def named_records(source: Source) -> Iterator[tuple[dict[str, Any], list[Message]]]:
    """Every record of a source as it is, and its conversation.

    Errors: those of `read`.
    """
    for number, record in enumerate(_records(source), start=1):
        try:
            yield record, _messages(_turns(record, source.column))
        except ValueError as error:
            raise DataError(
                f"{source.path}, record {number}: {error}. A record looks like {FORMS}."
            ) from error


def regular(messages: list[Message]) -> list[Message]:
    """The longest beginning in which user and assistant take turns, user first.

    A system turn at the start is kept, turns of the assistant before the first user turn are left
    out, and an empty turn ends the conversation.
    """
    kept = [m for m in messages[:1] if m["role"] == "system" and m["content"].strip()]
    turns = itertools.dropwhile(lambda m: m["role"] != "user", messages)
    for turn, role in zip(turns, itertools.cycle(["user", "assistant"]), strict=False):
        if turn["role"] != role or not turn["content"].strip():
            break
        kept.append(turn)
    return kept


def _records(source: Source) -> Iterator[Any]:
    if source.path.startswith(HUB_FILE):
        source = replace(source, path=_fetched(source))
    path = Path(source.path).expanduser()
    if path.suffix in (".json", ".jsonl") and path.is_file():
        return _from_json(path)
    if not path.exists() and (path.suffix in (".json", ".jsonl", *LOADERS) or path.is_absolute()):
        raise DataError(f"there is no '{path}'. Pass data.source= {SOURCES}.")
    # imported where it is used: it takes seconds, which other commands need not wait for
    from datasets.exceptions import DatasetsError

    try:
        return iter(_from_datasets(source, path))
    except (OSError, ValueError, DatasetsError) as error:
        raise _unreadable(source, error) from error


def _fetched(source: Source) -> str:
    """The local copy of one file of a dataset on the hub."""
    owner, name, file = [*source.path.removeprefix(HUB_FILE).split("/", 2), "", ""][:3]
    try:
        return hf_hub_download(
            f"{owner}/{name}", file, repo_type="dataset", revision=source.revision
        )
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        raise _unreadable(source, error) from error


def _unreadable(source: Source, error: Exception) -> DataError:
    return DataError(
        f"data.source={source.path} (subset {source.subset}, split {source.split}, revision "
        f"{source.revision}) cannot be read: {error} Pass {SOURCES}; the hub needs a network, "
        "and a gated dataset needs `hf auth login`."
    )


def _from_datasets(source: Source, path: Path) -> Iterable[Any]:
    from datasets import DatasetDict, load_dataset, load_from_disk

    if path.is_file():
        if path.suffix not in LOADERS:
            raise ValueError(f"nothing reads files that end in '{path.suffix}'.")
        return load_dataset(LOADERS[path.suffix], data_files=str(path), split="train")
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        loaded = load_from_disk(path)
        if not isinstance(loaded, DatasetDict):
            return loaded
        if source.split not in loaded:
            raise ValueError(f"its splits are {', '.join(loaded)}; pass data.split=.")
        return loaded[source.split]
    name = str(path) if path.is_dir() else source.path
    return load_dataset(name, source.subset, split=source.split, revision=source.revision)


def _from_json(path: Path) -> Iterator[Any]:
    """Records of a file that is one JSON list, or has one JSON object per line."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            start = next((line for line in file if line.strip()), "")
            file.seek(0)
            if start.lstrip().startswith("["):
                yield from json.load(file)
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _line(path, number, line)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}); convert it.") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: {error}.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {number} is not JSON ({error}); a file is one JSON list, or one object "
            "per line."
        ) from error


def _turns(record: Any, column: str | None) -> list[Any]:
    """The list of turns in a record; a cell of a table may hold it as JSON text."""
    if not isinstance(record, dict):
        raise ValueError(f"it is a {type(record).__name__}, not an object")
    names = [column] if column else [name for name in COLUMNS if name in record]
    if not names or names[0] not in record:
        wanted = f"'{column}'" if column else "conversation"
        raise ValueError(
            f"it has no {wanted} among its fields ({', '.join(map(str, record)) or 'none'}); "
            "name the right one with data.column="
        )
    turns = record[names[0]]
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except json.JSONDecodeError as error:
            raise ValueError(f"'{names[0]}' is text, but not JSON ({error})") from error
    if not isinstance(turns, list):
        raise ValueError(f"'{names[0]}' is a {type(turns).__name__}, not a list of turns")
    if names[0] == QUESTION:
        return [
            {"from": "user", "value": turn} if isinstance(turn, str) else turn for turn in turns
        ]
    return turns


def _messages(turns: list[Any]) -> list[Message]:
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise ValueError(f"turn {number} is a {type(turn).__name__}, not an object")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if role not in ROLES:
            raise ValueError(
                f"turn {number} has the role {role!r} (in 'role' or 'from'); known are "
                f"{', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise ValueError(
                f"turn {number} has no text in 'content' or 'value' but {type(content).__name__}"
            )
        messages.append(Message(role=ROLES[role], content=mended(content)))
    return messages
