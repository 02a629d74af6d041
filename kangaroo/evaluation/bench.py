"""Benches: questions in Spec-Bench's format or in columns of a table (docs/evaluation.md), shipped,
downloaded, from the hub, or local."""

import hashlib
import http.client
import json
import logging
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from huggingface_hub import hf_hub_download
from pyarrow import ArrowException, parquet

from kangaroo.models.prompts import Message, Tokenizer, prompt_ids, valid_text
from kangaroo.models.target import TargetModel
from kangaroo.utils import tables
from kangaroo.utils.errors import ConfigError, CorruptFile, DataError, PromptError
from kangaroo.utils.folders import cache_folder, command_line, write_whole
from kangaroo.utils.ranges import Count, Ranged

log = logging.getLogger(__name__)

DEMO = "demo"
# The placeholder in SPEED-Bench's files for questions whose licence forbids copies.
UNFILLED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
# Columns of the report, beside which no task may have that name.
COLUMNS = "method", "overall"
# MT-bench's eight categories, which are one task of Spec-Bench.
MTBENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
T = TypeVar("T")


@dataclass
class BenchConfig(Ranged):
    """Where questions come from: the first of `path`, `url`, `hub` that is set, else the package.

    Args:
        name: name in results, and of a shipped file. Empty: the name of `path`, else the demo.
        path: a local file of JSON lines, a .parquet file, or a folder of .parquet and .jsonl files;
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


class File(NamedTuple):
    """The lines of a bench or of a part of it."""

    source: str  # what errors call it
    content: bytes
    category: str  # of questions without one


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
        prompt = prompt_ids(tokenizer, self.conversation(answers))
        if len(prompt) >= lm.context:
            raise PromptError(
                f"question {self.question_id}, turn {len(answers) + 1} has {len(prompt)} tokens, "
                f"and the model's context is {lm.context}. Leave it out of the bench, or lower "
                "max_new_tokens if the answer before it is what is long."
            )
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
    fields = [asdict(question).items() for question in questions]
    # an empty system turn is left out: earlier results had no such field
    kept = [{k: v for k, v in x if k != "task" and (v or k != "system")} for x in fields]
    content = json.dumps(kept)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def load_questions(config: BenchConfig) -> list[Question]:
    """The bench's questions in file order. Errors: `DataError`, `CorruptFile`, `ConfigError`."""
    if config.path is not None:
        files = _read_local(config, Path(config.path))
    elif config.url is not None:
        file = cache_folder() / "benches" / f"{config.name}.jsonl"
        files = [File(str(file), _download(config, config.url, file), config.name)]
    elif config.hub is not None:
        files = _read_hub(config, config.hub)
    else:
        shipped = Path(__file__).parent / "benches" / f"{config.name}.jsonl"
        if not shipped.is_file():
            raise ConfigError(
                f"no bench '{config.name}' is shipped, only {DEMO}; pass bench.path= or bench.url=."
            )
        files = [File(config.name, shipped.read_bytes(), config.name)]
    return parse(files, config)


def question_prompts(
    tokenizer: Tokenizer, count: int, bench: BenchConfig, longest: int
) -> list[list[int]]:
    """First turns of `count` questions, spread over the tasks, with at most `longest` tokens."""
    questions = load_questions(bench)
    prompts = [prompt_ids(tokenizer, question.conversation()) for question in questions]
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


def _read_local(config: BenchConfig, path: Path) -> list[File]:
    try:
        paths = _files_below(config, path) if path.is_dir() else [path]
        contents = [_read_lines(file) for file in paths]
    except (OSError, ArrowException) as error:
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise DataError(
            f"bench.path={path} cannot be read: {reason}. Pass a .jsonl or .parquet file of "
            "questions, or a folder of such files."
        ) from error
    if config.sha256 and hashlib.sha256(b"\n".join(contents)).hexdigest() != config.sha256:
        log.warning("%s does not hold the questions of %s (its sha256 differs)", path, config.name)
    return [
        File(str(file), content, _category(config, file.name))
        for file, content in zip(paths, contents, strict=True)
    ]


def _files_below(config: BenchConfig, path: Path) -> list[Path]:
    """The files of a folder that `config.subset` and `config.split` name, sorted."""
    files = [file for file in path.rglob("*") if file.suffix.lower() in (".parquet", ".jsonl")]
    names = {file: {*file.relative_to(path).parts[:-1]} for file in files}
    for file in files:
        if file.suffix.lower() == ".jsonl":  # JSON lines go by the name that they have on the hub
            names[file].add(file.relative_to(path).as_posix())
    known = set[str]().union(*names.values())
    wanted = set(config.subset.split("+")) if config.subset and known else set()
    if unknown := wanted - known:
        raise DataError(
            f"bench.path={path} has no folder or .jsonl file '{min(unknown)}', only "
            f"{', '.join(sorted(known))}. Pass bench.subset= some, or null for all."
        )
    files = sorted(file for file in files if not wanted or names[file] & wanted)
    return [file for file in files if file.name.startswith(config.split)] or files


def _category(config: BenchConfig, file: str) -> str:
    """That of questions in a file which does not say it."""
    return Path(file).stem if ".jsonl" in (config.subset or "") else config.name


def _read_lines(file: Path) -> bytes:
    with file.open("rb") as stream:  # pyarrow's error for a missing file does not say so
        if file.suffix.lower() != ".parquet":
            return stream.read()
    return _as_lines(parquet.read_table(file, partitioning=None).to_pylist())


def _as_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    # no field that a question needs is a date or bytes, which JSON lacks
    return "\n".join(json.dumps(row, default=lambda _: None) for row in rows).encode()


def _read_hub(config: BenchConfig, name: str) -> list[File]:
    from datasets import load_dataset  # slow to import, and other benches do not need it
    from datasets.exceptions import DatasetsError

    files = []
    for part in config.subset.split("+") if config.subset else [None]:
        source = f"{name} ({part})" if part else name
        try:
            if part and part.endswith(".jsonl"):
                content = Path(hf_hub_download(name, part, repo_type="dataset")).read_bytes()
            else:
                content = _as_lines(load_dataset(name, part, split=config.split))
        except (OSError, ValueError, DatasetsError) as error:  # the hub's own errors are OSErrors
            raise DataError(
                f"{source} cannot be read from the hub: {str(error).rstrip('.')}. Go online "
                "once (and where its licence has to be accepted, do that at its page), or pass "
                "bench.path=."
            ) from error
        files.append(File(source, content, _category(config, part or name)))
    return files


def _download(config: BenchConfig, url: str, file: Path) -> bytes:
    """The content of a file in the cache, which is downloaded the first time."""
    is_cached = file.is_file()
    try:
        with file.open("rb") if is_cached else urllib.request.urlopen(url, timeout=30) as stream:
            content: bytes = stream.read()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"{url} cannot be downloaded ({error}). Go online once, or fetch the file "
            "elsewhere and pass bench.path=."
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if config.sha256 and digest != config.sha256:
        source, fix = url, "Try again, or check what stands between you and that address"
        if is_cached:
            source, fix = f"'{file}'", "Delete it, so that it is downloaded again"
        raise CorruptFile(
            f"the questions of {config.name} from {source} have sha256 {digest}, not "
            f"{config.sha256}. {fix}, or pass bench.path=."
        )
    if not is_cached:
        write_whole(file, content)
    return content


def parse(files: Sequence[File], config: BenchConfig) -> list[Question]:
    """Questions from JSON lines. Errors: `DataError`."""
    questions: dict[int, Question] = {}
    lines_before, unfilled = 0, 0
    for file in files:
        lines = file.content.splitlines()
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = _row(json.loads(line), config)
                question = _question(row, file.category, default_id=lines_before + number)
                if question.question_id in questions:
                    raise ValueError(f"question_id {question.question_id} again")
            except (ValueError, RecursionError) as error:  # too many digits, too many brackets
                form = _form(config, file.source)
                raise DataError(f"{file.source}, line {number}: {error}. {form}") from error
            if any(turn.startswith(UNFILLED) for turn in question.turns):
                unfilled += 1
                continue
            if config.name in (DEMO, "spec_bench") and question.category in MTBENCH:
                question.task = "mt_bench"
            questions[question.question_id] = question
        lines_before += len(lines)
    sources = ", ".join(file.source for file in files) or config.path
    if unfilled:
        log.warning(
            "%s of %s left out: their text has to be fetched from its sources, as NVIDIA's script "
            "for SPEED-Bench does; pass what that writes as bench.path=.",
            *(tables.count(unfilled, "question"), sources),
        )
    if not questions:
        raise DataError(f"{sources} holds no questions. Pass bench.path= a file with some.")
    return list(questions.values())


def _form(config: BenchConfig, source: str) -> str:
    """What the lines of a bench must look like."""
    if config.question is not None:
        return "bench.question= and bench.category= name the columns to read"
    command = command_line("prepare split", source=source, output="outputs/questions")
    return (
        'A bench has one question a line, such as {"turns": ["Why?"]}; of conversations this makes '
        f"one: {command}"
    )


def _row(fields: Any, config: BenchConfig) -> dict[str, Any]:
    """A line's fields; of a table, what `config.question` and `config.category` choose."""
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    if config.question is None:
        return fields
    names = config.question.split("+")
    for name in (*names, config.category):
        if name is not None and name not in fields:
            raise ValueError(f"there is no column '{name}', only {', '.join(fields)}")
    turns = fields[names[0]]
    if len(names) > 1 or not isinstance(turns, list):
        texts = [fields[name] for name in names if fields[name]]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{config.question} is neither text nor a list of turns")
        turns = [config.instruction + "\n\n".join(texts)] if texts else []
    return {"turns": turns, "category": fields[config.category] if config.category else None}


def _question(row: dict[str, Any], category: str, default_id: int) -> Question:
    valid_text(json.dumps(row, ensure_ascii=False))
    fields: dict[str, Any] = {"question_id": default_id, "category": category}
    fields |= {name: value for name, value in row.items() if value is not None}
    if isinstance(question_id := fields["question_id"], str):
        fields["question_id"] = int(hashlib.sha256(question_id.encode()).hexdigest()[:15], 16)
    if type(fields["question_id"]) is not int or abs(fields["question_id"]) >= 2**63:
        raise ValueError("question_id must be an integer of 64 bits")
    if not isinstance(fields["category"], str):
        raise ValueError("category must be a string")
    if fields["category"] in COLUMNS:
        raise ValueError(f"a category may not be called {' or '.join(COLUMNS)}, as columns are")
    turns, system = fields.get("turns"), fields.get("system", "")
    if turns is None and isinstance(messages := fields.get("messages"), list):
        # the form in which NVIDIA's tools write SPEED-Bench
        dicts = [message for message in messages if isinstance(message, dict)]
        if dicts and dicts[0].get("role") == "system":
            system = dicts.pop(0).get("content")
        if others := {str(x.get("role")) for x in dicts} - {"user", "assistant"}:
            raise ValueError(f"a turn with the role {min(others)} cannot stand where it does")
        turns = [message.get("content") for message in dicts if message.get("role") == "user"]
    are_strings = isinstance(turns, list) and all(isinstance(x, str) and x.strip() for x in turns)
    if not turns or not are_strings:
        raise ValueError("turns must be a list of at least one string, none of them blank")
    if not isinstance(system, str):
        raise ValueError("a system turn must be a string")
    ids, reference = (fields["question_id"], fields["category"]), fields.get("reference")
    return Question(*ids, turns, reference, system=system)
