"""Where things are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_dir


def cache_folder() -> Path:
    """`$KANGAROO_CACHE`, else the platform's cache folder."""
    return Path(os.environ.get("KANGAROO_CACHE") or user_cache_dir("kangaroo"))
