"""Make a page of a finished run: python scripts/result_page.py OUTPUT docs/spec_bench.md

OUTPUT is the folder of an evaluation of several methods (see docs/evaluation.md). The results that
the page is made from are kept beside it.
"""

import argparse
from pathlib import Path

from kangaroo.evaluation.result_page import gather, write
from kangaroo.utils.errors import KangarooError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="the output folder of evaluate.py")
    parser.add_argument("page", type=Path, help="the Markdown file to write")
    asked = parser.parse_args()
    try:
        write(gather(asked.results), asked.page)
    except KangarooError as error:
        parser.error(str(error))
