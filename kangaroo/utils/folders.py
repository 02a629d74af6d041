"""Where things lie that come with the project or can be made again, and what folders are called."""

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

from kangaroo.utils.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
SHIPPED = Path("adapters")  # `SHIPPED / NAME` is what the model NAME takes
TORCHRUN = "torchrun --nproc-per-node=N"
LONGEST_NAME = 200  # bytes; file systems take 255, with what stands before it (`compare-BENCH`)


def of_project(name: str) -> Path:
    """A folder of the project: in the installed package, else beside the package in a checkout."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def command_line(
    command: str, *words: str, launcher: str = "python", **options: str | bool | Path
) -> str:
    """A command as a user types it, in a checkout by its script, else by the installed program;
    `words` stand after its name as they are, and options have `__` for a dot."""
    name, *action = command.split()
    if (PACKAGE / "configs").is_dir():
        program = "kangaroo" if launcher == "python" else f"{launcher} -m kangaroo"
    else:
        folder = "" if name in ("train", "evaluate") else "scripts/"
        program, name = launcher, f"{folder}{name}.py"
    assigned = [f"{k.replace('__', '.')}={_quoted(v)}" for k, v in options.items()]
    return " ".join([program, name, *action, *map(shlex.quote, [*words, *assigned])])


def install(extra: str) -> str:
    """The command that installs what only some uses need. PyPI's kangaroo is another project."""
    if (PACKAGE / "configs").is_dir():
        return f'pip install "CHECKOUT[{extra}]"'
    return f'pip install -e "{PACKAGE.parent}[{extra}]"'


def _quoted(value: str | bool | Path) -> str:
    """A value as Hydra reads it; within quotation marks it is a text, whatever it holds."""
    if isinstance(value, bool):
        return str(value).lower()
    if re.fullmatch(r"[\w./:+-]+", str(value), re.ASCII):
        return str(value)
    doubled = re.sub(r'(\\+)(?="|$)', r"\1\1", str(value))
    return '"' + doubled.replace('"', '\\"') + '"'


def located(path: str) -> Path:
    """Where a path leads: `adapters/NAME`, if the working folder has none, to the shipped one."""
    given = Path(path).expanduser()
    shipped = of_project("adapters") / given.name
    is_shipped = given.parent == SHIPPED and not given.exists() and shipped.exists()
    return shipped if is_shipped else given


def cache_folder() -> Path:
    """`$KANGAROO_CACHE`, else the platform's cache folder."""
    return Path(os.environ.get("KANGAROO_CACHE") or user_cache_dir("kangaroo"))


@contextmanager
def sole_writer(folder: Path, rank: int) -> Iterator[None]:
    """Let no other process of that rank write into a folder until this one leaves, or ends. Errors:
    `ConfigError` where one does already."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / f".lock-{rank}").acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"another process writes into '{folder}' now. Wait for it, or pass another output=."
        ) from error
    with lock:
        yield


@contextmanager
def new_folder(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Where to write what `folder` is to hold, which appears whole, at the end, or not at all; with
    `replace` in place of what is there. Errors: `ConfigError` where there is something else."""
    if folder.exists() and not replace:
        raise ConfigError(
            f"'{folder}' is there already, and nothing is written over it. Pass output= another "
            "folder, or remove this one."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
        (partial := Path(beside, folder.name)).mkdir()
        yield partial
        if replace:
            shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file that appears whole or, if the process is killed, not at all."""
    part = file.with_name(f"{file.name}.{uuid4().hex}.part")  # others may write the same file
    part.write_bytes(content)
    os.replace(part, file)


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write JSON in the same way."""
    write_whole(file, (json.dumps(value, indent=2) + "\n").encode())


def named_by(overrides: list[str], excluded: list[str], part: str) -> str:
    """What the command line says (`drafter.steps=4`), as a part of a folder's name, each after a
    comma: of `part` "drafter" its own options, by their short names, else all others."""
    words = (override.lstrip("+~").removeprefix("drafter@") for override in overrides)
    kept = [word for word in words if word.partition("=")[0] not in excluded]
    kept = [word for word in kept if word.startswith("drafter.") == (part == "drafter")]
    named = "".join(sorted(f",{word.removeprefix('drafter.')}" for word in kept))
    return fitting(re.sub(r"[^\w.=,+-]+", "-", named))


def fitting(path: str) -> str:
    """The same path; of a name too long for file systems its beginning, and a hash of all of it."""
    names = path.split("/")
    for i, whole in enumerate(map(str.encode, names)):
        if len(whole) > LONGEST_NAME:
            digest = hashlib.sha256(whole).hexdigest()[:16]
            beginning = whole[: LONGEST_NAME - len(digest) - 1].decode(errors="ignore")
            names[i] = f"{beginning}-{digest}"
    return "/".join(names)
