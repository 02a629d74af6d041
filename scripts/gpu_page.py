"""Write into a page what gpu.sh found: python scripts/gpu_page.py outputs/gpu docs/gpu.md."""

import argparse
from pathlib import Path

from kangaroo.evaluation.speed.gpu_page import write

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the folder that gpu.sh wrote")
    parser.add_argument("page", type=Path, help="the Markdown file; what it says above is kept")
    given = parser.parse_args()
    if not given.results.is_dir():
        parser.error(f"'{given.results}' is no folder; run scripts/gpu.sh first")
    write(given.results, given.page)
