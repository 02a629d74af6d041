"""Benches: questions in Spec-Bench's format or in columns of a table (docs/evaluation.md), shipped,
downloaded, from the hub, or local."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from torch.hub import download_url_to_file

from kangaroo.data.reading import FORMS, HUB_FILE, BadRecord, Source, conversation, records
from kangaroo.engine.requests import Request
from kangaroo.models.prompts import Message, Tokenizer, prompt_ids, sanitized
from kangaroo.models.target import TargetModel
from kangaroo.utils import tables
from kangaroo.utils.errors import ConfigError, CorruptFile, DataError, explained, naming
from kangaroo.utils.folders import cache_folder
from kangaroo.utils.ranges import Count, Ranged

log = logging.getLogger(__name__)

DEMO = "demo"
# The placeholder in SPEED-Bench's files for questions whose licence forbids copies.
UNFILLED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
FORM = (
    f'A question looks like {{"turns": ["Why?"]}} or {FORMS}; of other tables bench.question= and '
    "bench.category= name the columns to read."
)
COLUMN_NAMES = "Pass bench.question= and bench.category= the names of its columns."
# Columns of the report; no task may have one of these names.
COLUMNS = "method", "overall"
# MT-bench's eight categories, which are one task of Spec-Bench.
MTBENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
T = TypeVar("T")


@dataclass
class BenchConfig(Ranged):
    """Where questions come from: the first of `path`, `url`, `hub` that is set, else the package.

    Args:
        name: name in results, and of a shipped file. Empty: the name of `path`, else the demo.
        path: a local file in any format of `data.source`, or a folder of .parquet and .jsonl files;
            in a folder, those whose names begin with `split` if there are some.
        url: downloaded once into the cache folder (`$KANGAROO_CACHE`, else the platform's).
        sha256: checksum that a download must have; a `path` with another one only gets a warning.
        hub: a dataset on the hub.
        subset: subsets of that dataset or its .jsonl files, or names of .jsonl files and folders
            below `path`, joined by +.
        split: that of a dataset on the hub.
        question: the column with the question, or with a list of the user's turns; of several
            columns, joined by +, the texts make one question. None: lines as Spec-Bench's.
        category: beside `question`, the column by which results are reported. None: the name of
            the file where `subset` names files, else that of the bench.
        instruction: what is written before the text of `question`.
        max_new_tokens: the longest answer to a turn.
    """

    name: str = ""
    path: str | None = None
    url: str | None = None
    sha256: str | None = None
    hub: str | None = None
    subset: str | None = None
    split: str = "test"
    question: str | None = None
    category: str | None = None
    instruction: str = ""
    max_new_tokens: Count = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self.name = self.name or bench_name(self.path)


def bench_name(path: str | None) -> str:
    """The default name of a bench that is read from `path`."""
    return DEMO if path is None else Path(path).stem


@dataclass
class Question:
    """A user's turns; the method under test answers each before it sees the next."""

    question_id: int  # 64 bits; if the bench has strings as ids, 60 bits of their hash
    category: str
    turns: list[str]
    reference: list[str] | None = None  # an answer for each turn, for the fingerprint only
    task: str = ""  # the group it is reported under; its category if empty
    system: str = ""  # what the conversation begins with, before the first turn

    def __post_init__(self) -> None:
        self.task = self.task or self.category

    def conversation(self, answers: Sequence[str] = ()) -> list[Message]:
        """The messages up to the turn that comes after these answers."""
        messages = [Message(role="system", content=self.system)] if self.system else []
        for turn, answer in zip(self.turns, answers, strict=False):
            messages.append(Message(role="user", content=turn))
            messages.append(Message(role="assistant", content=answer))
        return [*messages, Message(role="user", content=self.turns[len(answers)])]

    def prompt(
        self, lm: TargetModel, tokenizer: Tokenizer, answers: Sequence[str] = ()
    ) -> list[int]:
        """The token ids of `conversation`. Errors: `PromptError`."""
        with naming(f"question {self.question_id}, turn {len(answers) + 1}"):
            prompt = prompt_ids(tokenizer, self.conversation(answers))
            Request(prompt, max_new_tokens=1).check_fits("the model's context is", lm.context)
        return prompt


def turn_seed(question_id: int, turn: int, seed: int) -> int:
    """The sampling seed of a turn, in 64 bits."""
    full = seed + 1000 * question_id + turn
    return full if abs(full) < 2**63 else full % 2**63


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` items, evenly spread: over all tasks if the items are sorted by task."""
    count = min(count, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]


def fingerprint(questions: list[Question]) -> str:
    """Hash of the questions, in order, with all their fields but the task."""
    # an empty system turn is left out: earlier results had no such field
    kept = [
        {k: v for k, v in asdict(question).items() if k != "task" and (v or k != "system")}
        for question in questions
    ]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def load_questions(config: BenchConfig) -> list[Question]:
    """The bench's questions in their order. Errors: `DataError`, `CorruptFile`, `ConfigError`."""
    questions: dict[int, Question] = {}
    count = 0
    unfilled = 0
    sources = _sources(config)
    for source in sources:
        is_part = ".jsonl" in (config.subset or "")
        category = Path(source.source).stem if is_part else config.name
        option = "bench.path" if config.hub is None else "bench.hub"
        for number, record in enumerate(records(source, option), start=1):
            count += 1
            fix = FORM if config.question is None else COLUMN_NAMES
            with explained(DataError, f"{source.source}, record {number}", fix, (ValueError,)):
                question = _question(_fields(record, config), category, default_id=count)
                if question.question_id in questions:
                    raise ValueError(f"question_id {question.question_id} again")
            if any(turn.startswith(UNFILLED) for turn in question.turns):
                unfilled += 1
                continue
            if config.name in (DEMO, "spec_bench") and question.category in MTBENCH:
                question.task = "mt_bench"
            questions[question.question_id] = question
    if unfilled:
        log.warning(
            "%s of %s left out: their text has to be fetched from its sources, as NVIDIA's script "
            "for SPEED-Bench does; pass what that writes as bench.path=.",
            tables.count(unfilled, "question"),
            config.name,
        )
    if not questions:
        names = ", ".join(source.source for source in sources) or config.path
        raise DataError(f"{names} holds no questions. Pass bench.path= a file with some.")
    return list(questions.values())


def question_prompts(
    tokenizer: Tokenizer, count: int, bench: BenchConfig, longest: int
) -> list[list[int]]:
    """First turns of `count` questions, spread over the tasks, with at most `longest` tokens."""
    prompts = [prompt_ids(tokenizer, question.conversation()) for question in load_questions(bench)]
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if not fitting:
        raise ConfigError(
            f"no question of {bench.name} has at most {longest} tokens, which is what the model's "
            "context leaves; lower speed.max_new_tokens or pass another bench."
        )
    return spread(fitting, count)


def long_prompt(tokenizer: Tokenizer, length: int) -> list[int]:
    """The last `length` tokens of a question on the demo bench's longest texts, repeated."""
    texts = sorted((question.turns[0] for question in load_questions(BenchConfig())), key=len)
    text = "\n\n".join([*texts[-20:], "Write a detailed summary of all of the above."])
    ids = prompt_ids(tokenizer, [Message(role="user", content=text)])
    return (ids * (length // len(ids) + 1))[-length:]


def _sources(config: BenchConfig) -> list[Source]:
    if config.path is not None:
        path = Path(config.path).absolute()
        if config.sha256 and path.is_file() and sha256(path) != config.sha256:
            about = f"does not hold the questions of {config.name} (its sha256 differs)"
            log.warning("%s %s", config.path, about)
        files = _files_below(config, path) if path.is_dir() else [path]
        return [Source(str(file)) for file in files]
    if config.url is not None:
        return [Source(str(_download(config, config.url)))]
    if config.hub is not None:
        parts = config.subset.split("+") if config.subset else [None]
        return [
            Source(f"{HUB_FILE}{config.hub}/{part}")
            if part and part.endswith(".jsonl")
            else Source(config.hub, part, config.split)
            for part in parts
        ]
    shipped = Path(__file__).parent / "benches" / f"{config.name}.jsonl"
    if not shipped.is_file():
        raise ConfigError(
            f"no bench '{config.name}' is shipped, only {DEMO}; pass bench.path= or bench.url=."
        )
    return [Source(str(shipped))]


def _files_below(config: BenchConfig, path: Path) -> list[Path]:
    """The files of a folder that `config.subset` and `config.split` name, sorted."""
    names: dict[Path, set[str]] = {}
    for file in sorted(path.rglob("*")):
        place = file.relative_to(path)
        if file.suffix.lower() == ".jsonl":  # JSON lines go by the name that they have on the hub
            names[file] = {place.as_posix(), *place.parts[:-1]}
        elif file.suffix.lower() == ".parquet":
            names[file] = {*place.parts[:-1]}
    known = set[str]().union(*names.values())
    wanted = set(config.subset.split("+")) if config.subset and known else set()
    if unknown := wanted - known:
        raise DataError(
            f"bench.path={path} has no folder or .jsonl file '{min(unknown)}', only "
            f"{', '.join(sorted(known))}. Pass bench.subset= some, or null for all."
        )
    files = [file for file in names if not wanted or names[file] & wanted]
    return [file for file in files if file.name.startswith(config.split)] or files


def sha256(file: Path) -> str:
    """The checksum of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _download(config: BenchConfig, url: str) -> Path:
    """The file in the cache folder that keeps what lies at an address."""
    file = cache_folder() / "benches" / f"{config.name}.jsonl"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        fix = "Go online and try again, or fetch the file elsewhere and pass bench.path=."
        causes = (OSError, HTTPException, RuntimeError)  # the last for another checksum
        with explained(DataError, f"{url} cannot be downloaded", fix, causes):
            download_url_to_file(url, str(file), config.sha256, progress=False)
    elif config.sha256 and sha256(file) != config.sha256:
        raise CorruptFile(
            f"'{file}' does not hold the questions of {config.name} (its sha256 differs). Delete "
            "it, so that it is downloaded again, or pass bench.path=."
        )
    return file


def _fields(record: Any, config: BenchConfig) -> dict[str, Any]:
    """A record's fields that have a value; of a table, those that the config chooses."""
    if isinstance(record, BadRecord):
        raise record
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    if config.question is not None:
        columns = config.question.split("+")
        for name in (*columns, config.category):
            if name is not None and name not in record:
                raise ValueError(f"there is no column '{name}', only {', '.join(record)}")
        turns = record[columns[0]]
        if len(columns) > 1 or not isinstance(turns, list):
            texts = [record[name] for name in columns if record[name]]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{config.question} is neither text nor a list of turns")
            turns = [config.instruction + "\n\n".join(texts)] if texts else []
        record = {"turns": turns, "category": record[config.category] if config.category else None}
    return {name: value for name, value in record.items() if value is not None}


def _question(fields: dict[str, Any], category: str, default_id: int) -> Question:
    """The question in a record's fields. Errors: `ValueError`."""
    category = fields.get("category", category)
    question_id = fields.get("question_id", default_id)
    if isinstance(question_id, str):
        question_id = int(hashlib.sha256(question_id.encode()).hexdigest()[:15], 16)
    if type(question_id) is not int or abs(question_id) >= 2**63:
        raise ValueError("question_id must be an integer of 64 bits")
    if not isinstance(category, str):
        raise ValueError("category must be a string")
    if category in COLUMNS:
        raise ValueError(f"a category may not be called {' or '.join(COLUMNS)}, as columns are")
    messages = conversation(fields)
    system = ""
    if messages and messages[0]["role"] == "system":
        system = messages.pop(0)["content"]
    if any(turn["role"] == "system" for turn in messages):
        raise ValueError("a system turn must come before all others")
    turns = [turn["content"] for turn in messages if turn["role"] == "user"]
    if not turns or not all(map(str.strip, turns)):
        raise ValueError("there must be at least one user's turn, and none that is blank")
    category = sanitized(category)
    return Question(question_id, category, turns, fields.get("reference"), system=system)
