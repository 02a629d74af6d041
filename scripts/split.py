"""Split questions into some to learn from and some to measure on (docs/data.md)."""

import argparse
from collections import Counter
from pathlib import Path

from kangaroo.data.filters import list_reasons
from kangaroo.data.reading import Source
from kangaroo.data.splitting import HELD_OUT, TRAINING, split
from kangaroo.errors import KangarooError

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", help="questions, in any form that data.source= takes")
    parser.add_argument("output", type=Path, help=f"a folder for {TRAINING} and {HELD_OUT}")
    parser.add_argument("--held", type=int, default=64, help="questions to hold out of each task")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and of the order")
    parser.add_argument("--skip-bad", action="store_true", help="leave out what cannot be read")
    asked = parser.parse_args()
    unreadable = Counter[str]() if asked.skip_bad else None
    try:
        made = split(Source(asked.source), asked.held, asked.seed, unreadable)
        made.write(asked.output)
    except (KangarooError, OSError) as error:
        parser.error(str(error))
    tasks = ", ".join(f"{count} of {task}" for task, count in made.tasks.items())
    print(
        f"{len(made.training)} questions to learn from, {len(made.held_out)} held out ({tasks}); "
        f"{made.left_out} left out, since they share a passage with those. In {asked.output}."
    )
    if unreadable:
        print(f"Left out, since they cannot be read: {list_reasons(unreadable)}.")
