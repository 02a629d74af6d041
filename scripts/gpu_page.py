"""Make a page of what gpu.sh found: python scripts/gpu_page.py outputs/gpu docs/gpu.md."""

import argparse
from pathlib import Path

from kangaroo.benchmark.gpu_page import page

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the folder that gpu.sh wrote")
    parser.add_argument("page", type=Path, help="the Markdown file to write")
    asked = parser.parse_args()
    if not asked.results.is_dir():
        parser.error(f"'{asked.results}' is no folder; run scripts/gpu.sh first")
    asked.page.write_text(page(asked.results), encoding="utf-8")
