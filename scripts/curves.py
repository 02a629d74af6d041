"""Draw a training run, also one that is still going on: python scripts/curves.py FOLDER..."""

import sys
from pathlib import Path

from kangaroo.training import curves

if __name__ == "__main__":
    for folder in sys.argv[1:]:
        curves.write(Path(folder))
