"""Paths of the project, the cache and outputs, safe writing of files, and command lines."""

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

from kangaroo.utils.errors import ConfigError, explained

PACKAGE = Path(__file__).parents[1]
SHIPPED = Path("adapters")  # `SHIPPED / NAME` is the default adapter of the model NAME
TORCHRUN = "torchrun --nproc-per-node=N"
LONGEST_NAME = 200  # bytes; file systems allow 255, including a prefix such as `compare-BENCH`


def project_folder(name: str) -> Path:
    """A folder of the project: inside the installed package, or beside it in a checkout."""
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def command_line(
    command: str, *words: str, launcher: str = "python", **options: str | bool | Path
) -> str:
    """A command as a user types it, by its script in a checkout, else by the installed program.
    `words` follow its name unchanged; names of options have `__` for a dot."""
    name, *action = command.split()
    if (PACKAGE / "configs").is_dir():
        program = "kangaroo" if launcher == "python" else f"{launcher} -m kangaroo"
    else:
        folder = "" if name in ("train", "evaluate") else "scripts/"
        program = launcher
        name = f"{folder}{name}.py"
    assigned = [f"{k.replace('__', '.')}={_quoted(v)}" for k, v in options.items()]
    return " ".join([program, name, *action, *map(shlex.quote, [*words, *assigned])])


def install(extra: str) -> str:
    """The command that installs an optional extra. PyPI's kangaroo is another project."""
    if (PACKAGE / "configs").is_dir():
        return f'pip install "CHECKOUT[{extra}]"'
    return f'pip install -e "{PACKAGE.parent}[{extra}]"'


def _quoted(value: str | bool | Path) -> str:
    """A value as Hydra reads it; in quotation marks it is always a string."""
    if isinstance(value, bool):
        return str(value).lower()
    if re.fullmatch(r"[\w./:+-]+", str(value), re.ASCII):
        return str(value)
    doubled = re.sub(r'(\\+)(?="|$)', r"\1\1", str(value))
    return '"' + doubled.replace('"', '\\"') + '"'


def resolve_path(name: str) -> Path:
    """A name as a path; an `adapters/NAME` that does not exist is the shipped adapter."""
    path = Path(name).expanduser()
    shipped = project_folder("adapters") / path.name
    is_shipped = path.parent == SHIPPED and not path.exists() and shipped.exists()
    return shipped if is_shipped else path


def cache_folder() -> Path:
    """`$KANGAROO_CACHE`, else the platform's cache folder."""
    return Path(os.environ.get("KANGAROO_CACHE") or user_cache_dir("kangaroo"))


def models_folder() -> Path:
    """The cache of models. Errors: `ConfigError` where there can be no such folder."""
    folder = cache_folder() / "models"
    problem = f"the cache folder '{folder}' cannot be made"
    with explained(ConfigError, problem, "Set KANGAROO_CACHE to another."):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def sole_writer(folder: Path, rank: int) -> Iterator[None]:
    """Lock a folder against other processes of the same rank. Errors: `ConfigError` where another
    process holds the lock, or there can be no such folder."""
    if not folder.name:
        raise ConfigError(f"output={folder} names no folder of its own. Pass one that does.")
    with explained(ConfigError, f"output={folder} cannot be a folder", "Pass another.", (OSError,)):
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
    """A temporary folder that is renamed to `folder` once it is complete. Errors: `ConfigError`
    where `folder` exists, unless `replace`."""
    if folder.exists() and not replace:
        raise ConfigError(
            f"'{folder}' is there already, and nothing is written over it. Pass output= another "
            "folder, or remove this one."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as parent:
        (partial := Path(parent, folder.name)).mkdir()
        yield partial
        if replace:
            shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def write_whole(file: Path, content: bytes) -> None:
    """Write a file atomically, in a folder that may be missing: a kill leaves no partial file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{uuid4().hex}.part")  # others may write the same file
    try:
        part.write_bytes(content)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_whole(file, (json.dumps(value, indent=2) + "\n").encode())


def overrides_suffix(overrides: list[str], excluded: list[str], part: str) -> str:
    """Command-line overrides (`drafter.steps=4`) as the end of a folder's name, each after a comma:
    for the `part` "drafter" its options, by their short names; otherwise all others."""
    words = [override.lstrip("+~").removeprefix("drafter@") for override in overrides]
    words = [word for word in words if word.partition("=")[0] not in excluded]
    words = [word for word in words if word.startswith("drafter.") == (part == "drafter")]
    suffix = "".join(sorted(f",{word.removeprefix('drafter.')}" for word in words))
    return fitting_name(re.sub(r"[^\w.=,+-]+", "-", suffix))


def fitting_name(text: str) -> str:
    """The text as the name of one folder, without slashes. A text that is too long for file systems
    is cut, and ends in a hash of the whole."""
    name = text.replace("/", "-").encode()
    if len(name) <= LONGEST_NAME:
        return name.decode()
    digest = hashlib.sha256(name).hexdigest()[:16]
    return f"{name[: LONGEST_NAME - len(digest) - 1].decode(errors='ignore')}-{digest}"
