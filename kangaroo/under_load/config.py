"""What a measurement under load is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kangaroo.drafters.base import DrafterConfig
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.serving.config import ServeConfig
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, Filled, Ranged

BASELINE = "vanilla"  # whose numbers the others are divided by


@dataclass
class LoadConfig(Ranged):
    """How much is asked of whom.

    Args:
        output: folder of cells and results; a run that was stopped goes on from there.
        bench: its questions, first turns alone, spread evenly over its list.
        server: how ours are run; each listens on a free port, and reads every prompt whole: the
            same questions are asked again and again.
        urls: servers that run already, by the names of their rows.
        users: how many ask at the same time, each one request after another.
        requests: of a cell, the same ones in all cells.
        new_tokens: of each answer; an EOS does not end it.
        rounds: so often everything is measured. The methods take turns, so that a machine that
            slows down favours nobody; a result is the median of the rounds.
        alone: a server is stopped before the next one starts, for models of which the memory holds
            one at a time; else all wait for their turns.
        resume: false forgets what `output` holds.
    """

    output: str
    bench: BenchConfig = field(default_factory=BenchConfig)
    server: ServeConfig = field(default_factory=lambda: ServeConfig(port=0, reuse=False))
    urls: dict[str, str] = field(default_factory=dict)
    users: Filled[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16])
    requests: Count = 32
    new_tokens: Count = 64
    rounds: Count = 3
    alone: bool = False
    resume: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.users) > self.requests:
            raise ConfigError(
                f"requests={self.requests} are fewer than the {max(self.users)} of users=; twice "
                "as many or more keep all users busy."
            )


@dataclass(frozen=True)
class Method:
    """What is measured: our server with a drafter, or one that runs already.

    Args:
        url: of the latter.
    """

    name: str
    drafter: DrafterConfig | None = None
    url: str | None = None


@dataclass(frozen=True)
class Cell:
    """One measurement: a method, so many users, in one of the rounds."""

    number: int  # of the round
    users: int
    method: str

    def file(self, folder: Path) -> Path:
        """What the client wrote; it is there if the cell is finished."""
        return folder / "cells" / f"{self.number}-{self.users}-{self.method}.json"


def cells(config: LoadConfig, methods: list[str]) -> Iterator[Cell]:
    """All cells in the order in which they are measured; who begins changes from round to round."""
    for number in range(config.rounds):
        first = number % len(methods)
        for users in config.users:
            for method in methods[first:] + methods[:first]:
                yield Cell(number, users, method)
