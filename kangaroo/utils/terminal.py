"""Progress bars and tables that can be read in a terminal, in a pipe and in a log file."""

import sys
from typing import Any

from rich.console import Console
from tqdm import tqdm

SECONDS_IN_FILES = 30  # between two states of a bar; a terminal shows ten a second
WIDTH_IN_FILES = 160  # characters


def progress_bar(*arguments: Any, **options: Any) -> "tqdm[Any]":
    """A progress bar of tqdm, with its arguments, that does not flood a log file."""
    if not sys.stderr.isatty():
        options |= {"mininterval": SECONDS_IN_FILES, "maxinterval": SECONDS_IN_FILES}
    return tqdm(*arguments, **options)


def console() -> Console:
    """Standard output as rich writes it, wide enough for tables where it is not a terminal."""
    return Console() if sys.stdout and sys.stdout.isatty() else Console(width=WIDTH_IN_FILES)
