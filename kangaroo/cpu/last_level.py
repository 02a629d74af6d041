"""The processor's last-level cache: how much of a model stays in it between two passes.

A pass reads more than it holds, so nothing would be found there again, though a draft reads the
shallow layers once for each of its tokens.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path


@cache
def staying_bytes() -> int:
    """How much of a model's layers, or of a head, stays in the last-level cache between passes:
    half of it. What does not would push it out, and is fetched past it, where that can be
    (`products.h`). All stays where the system does not tell the cache's size."""
    return last_level_cache(Path("/sys/devices/system/cpu/cpu0/cache")) // 2 or sys.maxsize


def last_level_cache(folder: Path) -> int:
    """Bytes of a processor's largest cache, by Linux's description; 0 where there is none."""
    sizes = [read_line(file) for file in folder.glob("index*/size")]
    return max((1024 * int(size[:-1]) for size in sizes if re.fullmatch(r"\d+K", size)), default=0)


def read_line(path: Path) -> str:
    """What is in a file of one line; nothing where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
