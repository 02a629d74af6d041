"""How often the tokens of a lookup and of a drafted chain are right: numbers, and the file of them.

A row of a table is a class of match lengths, a column a class of probabilities. The match length of
a lookup's further tokens counts those before them: what has matched so far.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kangaroo.utils.errors import AdapterMismatch, CorruptFile

FILE = "calibration.json"
CHOICES = 3  # for a token of the chain: the best, and two further ones
LENGTHS = [1, 2, 3, 5, 9, 17, 33]
PROBABILITIES = [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9]


@dataclass(frozen=True)
class AcceptanceTable:
    """The share of right tokens, of those before which all were right.

    Args:
        lengths: where each class of match lengths begins, ascending from 1.
        probabilities: where each class of probabilities begins, ascending from 0.
        lookup: the lookup's token, by match length, where no chain was drafted, or it has ended.
        chain: the chain's token, by its confidence, where the lookup has none.
        runner_up: a further choice for a token of the chain, by its own probability, where no
            better choice and not the lookup's token is right.
        same: the token that both say, by match length and confidence.
        further: the lookup's token where it is such a further choice.
        other: the lookup's token where it is no choice of the chain's.
        against: the chain's token where the lookup says another.
        adds: the chain is right and the lookup wrong, by match length alone: what is known before
            the chain's token is drafted. The first number is for no match.
    """

    lengths: list[int]
    probabilities: list[float]
    lookup: list[float]
    chain: list[float]
    runner_up: list[float]
    same: list[list[float]]
    further: list[list[float]]
    other: list[list[float]]
    against: list[list[float]]
    adds: list[float]

    def row(self, length: int) -> int:
        """The class of a match length of 1 or more."""
        return bisect_right(self.lengths, length) - 1

    def column(self, probability: float) -> int:
        """The class of a probability."""
        return bisect_right(self.probabilities, probability) - 1


def assumed() -> AcceptanceTable:
    """For an adapter that nothing was counted for: a chain whose confidence is right, and a lookup
    as good as it was on SmolLM2-135M, neither of which knows of the other.
    """
    lookup = [0.25, 0.5, 0.7, 0.75, 0.85, 0.95, 0.99]
    edges = [*PROBABILITIES, 1.0]
    chain = [(low + high) / 2 for low, high in pairwise(edges)]
    other = [[right * (1 - drafted) for drafted in chain] for right in lookup]
    return AcceptanceTable(
        lengths=LENGTHS,
        probabilities=PROBABILITIES,
        lookup=lookup,
        chain=chain,
        runner_up=chain,
        same=[[1 - (1 - right) * (1 - drafted) for drafted in chain] for right in lookup],
        further=other,
        other=other,
        against=[[drafted * (1 - right) for drafted in chain] for right in lookup],
        adds=[0.45 * (1 - right) for right in [0.0, *lookup]],
    )


def write(acceptance: AcceptanceTable, weights: str, about: dict[str, Any], folder: Path) -> Path:
    """Write the odds of an adapter beside it, and return the file's path.

    Args:
        weights: hash of the adapter's weights.
        about: where the numbers come from, as JSON values.
    """
    tables = ",\n    ".join(
        f'"{name}": {_lines(value)}' for name, value in asdict(acceptance).items()
    )
    rest = json.dumps({"weights": weights} | about, indent=2).removeprefix("{")
    file = folder / FILE
    file.write_text('{\n  "odds": {\n    ' + tables + "\n  }," + rest + "\n")
    return file


def _lines(table: list[Any]) -> str:
    """A list as JSON, each row of a matrix in a line of its own."""
    if not isinstance(table[0], list):
        return json.dumps(table)
    return "[\n      " + ",\n      ".join(map(json.dumps, table)) + "\n    ]"


def read(folder: Path, weights: str, count: str) -> AcceptanceTable | None:
    """The odds of the adapter in a folder; None where nothing was counted for it.

    Args:
        weights: hash of the adapter's weights.
        count: the command that counts again.

    Errors: `AdapterMismatch` where they are those of other weights, `CorruptFile`.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text())
        counted_for, acceptance = record["weights"], AcceptanceTable(**record["odds"])
        _check(acceptance)
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptFile(
            f"{file} cannot be read ({type(error).__name__}: {error}); delete it, or count again: "
            f"{count}"
        ) from error
    if counted_for != weights:
        raise AdapterMismatch(
            f"{file} was counted for an adapter with the weights {counted_for}; those beside it "
            f"are {weights}. Count again: {count}"
        )
    return acceptance


def fingerprint(acceptance: AcceptanceTable) -> str:
    """Hash of all its numbers."""
    return hashlib.sha256(json.dumps(asdict(acceptance)).encode()).hexdigest()[:16]


def _check(acceptance: AcceptanceTable) -> None:
    """Raise `ValueError` where a table has not the shape that its classes ask for."""
    rows, columns = len(acceptance.lengths), len(acceptance.probabilities)
    if acceptance.lengths[:1] != [1] or acceptance.probabilities[:1] != [0]:
        raise ValueError("lengths must begin with 1, probabilities with 0")
    shapes = {"lookup": rows, "chain": columns, "runner_up": columns, "adds": rows + 1}
    for name, size in shapes.items():
        _check_shares(name, getattr(acceptance, name), size)
    for name in ("same", "further", "other", "against"):
        table = getattr(acceptance, name)
        if len(table) != rows:
            raise ValueError(f"{name} must have {rows} rows, not {len(table)}")
        for row in table:
            _check_shares(name, row, columns)


def _check_shares(name: str, shares: list[float], size: int) -> None:
    if len(shares) != size or not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"{name} must hold {size} numbers from 0 to 1, not {shares}")
