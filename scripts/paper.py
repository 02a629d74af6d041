"""Write what the paper's experiments found into a page: python scripts/paper.py RESULTS PAGE."""

import argparse
from pathlib import Path

from kangaroo.evaluation.study import page
from kangaroo.utils.errors import KangarooError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="a model's folder of the experiments' results")
    parser.add_argument("page", type=Path, help="the Markdown file to write into")
    asked = parser.parse_args()
    if not asked.results.is_dir():
        parser.error(f"'{asked.results}' is no folder; run make paper, or evaluate.py, first")
    try:
        page.rewrite(asked.page, asked.results)
    except (KangarooError, OSError) as error:
        parser.error(str(error))
