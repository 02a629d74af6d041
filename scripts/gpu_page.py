"""Make a page of what gpu.sh found: python scripts/gpu_page.py outputs/gpu docs/gpu.md."""

import sys
from pathlib import Path

from kangaroo.benchmark.gpu_page import page

if __name__ == "__main__":
    folder, target = map(Path, sys.argv[1:])
    target.write_text(page(folder), encoding="utf-8")
