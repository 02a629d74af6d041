"""Draw training runs, also ones that are still going on: python scripts/curves.py FOLDER..."""

import argparse
from pathlib import Path

from kangaroo.training import curves
from kangaroo.utils.errors import KangarooError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run's output")
    try:
        for folder in parser.parse_args().folders:
            curves.write(folder)
    except KangarooError as error:
        parser.error(str(error))
