"""What a soak keeps of each drafter in each setting: a line of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """A text that is not vanilla's, with all that makes it again.

    Args:
        prompt: token ids.
        position: index of the first token that differs, among the new ones.
        vanilla, found: the two tokens; empty where a text has ended.
        gap, label: whether rounding explains it, see `evaluation.records.Fork`.
    """

    prompt: list[int]
    seed: int
    max_new_tokens: int
    eos_ids: list[int]
    position: int
    vanilla: list[int]
    found: list[int]
    gap: float | None
    label: str


@dataclass(frozen=True)
class Cell:
    """All requests of a setting by one drafter.

    Args:
        part, number: of the setting.
        options: the drafter's and the engine's, as they were drawn.
        batch: rows at a time.
        tokens: that vanilla wrote, and that were compared.
        drafted, accepted: draft tokens.
        ended_by_eos: texts.
        seconds: of decoding, without vanilla's.
    """

    part: str
    number: int
    drafter: str
    options: dict[str, Any]
    family: str
    sampling: str
    batch: int
    texts: int
    tokens: int
    drafted: int
    accepted: int
    ended_by_eos: int
    seconds: float
    differences: list[Difference]

    @property
    def key(self) -> str:
        """No other cell has it."""
        return f"{self.part}/{self.number}/{self.drafter}"

    @property
    def where(self) -> str:
        """In words."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.key} ({self.family}, {self.sampling}, {options})"


def cell_of(fields: dict[str, Any]) -> Cell:
    """The cell of a line's fields."""
    found = [Difference(**difference) for difference in fields["differences"]]
    return Cell(**(fields | {"differences": found}))
