"""The range of every number that a user may set: part of its field's type (`steps: DraftSize = 6`).

A dataclass that is `Ranged` refuses others when it is made; the command line does so before, and
names their place there. Hydra sees the plain types.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kangaroo.utils.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Finite numbers between two ends, which belong to it (`least`, `most`) or do not; with `auto`
    that word, too. Of a list it is the range of its length."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    auto: bool = False

    def __contains__(self, number: float) -> bool:
        inside = self.least <= number <= self.most and self.above < number < self.below
        return inside and abs(number) != math.inf

    def __str__(self) -> str:
        ends = {"{} or more": self.least, "above {}": self.above}
        ends |= {"at most {}": self.most, "below {}": self.below}
        return " and ".join(text.format(end) for text, end in ends.items() if math.isfinite(end))


AUTO = "auto"
MOST = (1 << 31) - 1  # what native code counts with
SEEDS = 1 << 63  # a text's seed lies in [-SEEDS, SEEDS), which tensors and native code hold

Count = Annotated[int, Range(1, MOST)]
CountOrZero = Annotated[int, Range(0, MOST)]
TextLength = Annotated[int, Range(2, MOST)]  # in tokens: of fewer, none is predicted
Index = Annotated[int, Range(-MOST, MOST)]  # of a list; a negative one counts from its end
Seed = Annotated[int, Range(0, (1 << 32) - 1)]  # numpy's; `seed * 1_000_003 + i` is a TextSeed
TextSeed = Annotated[int, Range(-SEEDS, SEEDS - 1)]
NoiseSeed = Annotated[int, Range(-SEEDS, SEEDS - 1 - MOST)]  # each row adds its number
MOST_NODES = 1024  # of a draft: each is held against each other one, and has a slot, in every row
DraftSize = Annotated[int, Range(1, MOST_NODES)]
Layers = Annotated[int, Range(1, 1024)]  # each is made, and no model has as many
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Chance = Annotated[float, Range(0, 1)]
Threshold = Annotated[float, Range(0, below=1)]  # at 1 nothing would ever be sure enough
AutoThreshold = Annotated[float | int | str, Range(0, below=1, auto=True)]  # Hydra tells 0 from 0.0
Share = Annotated[float, Range(above=0, most=1)]
Filled = Annotated[list[T], Range(1)]


class Ranged:
    """A dataclass of options whose numbers lie in their ranges."""

    def __post_init__(self) -> None:
        check(type(self), vars(self), f"{type(self).__name__}.")


def check_nodes(count: int, **options: int) -> None:
    """Errors: `ConfigError` where options of a drafter make more nodes than a draft may have."""
    if count > MOST_NODES:
        settings = ", ".join(f"drafter.{name}={value}" for name, value in options.items())
        raise ConfigError(f"{settings} make {count} nodes, of {MOST_NODES} at most. Lower one.")


def check(kind: type, values: Mapping[str, Any], place: str = "") -> None:
    """Refuse values, by field, that do not lie in the ranges of a dataclass's fields. Errors:
    `ConfigError` names the first one with its range, after a place such as "trainer."."""
    for name, hint in _types(kind).items():
        if name in values and (wanted := _wanted(hint, values[name])) is not None:
            raise ConfigError(f"{place}{name}={values[name]!r} must be {wanted}.")


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _wanted(hint: Any, value: Any) -> str | None:
    """What a value of that type has to be, where it is not; None where it is."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType) and NoneType in parts:
        (inner,) = (part for part in parts if part is not NoneType)
        wanted = None if value is None else _wanted(inner, value)
        return wanted and f"{wanted}, or null"
    if origin in (list, tuple):
        if not isinstance(value, Sequence) or isinstance(value, str):
            return "a list"
        each = (_wanted(parts[min(i, len(parts) - 1)], item) for i, item in enumerate(value))
        wanted = next(filter(None, each), None)
        return wanted and f"a list of which each is {wanted}"
    if origin is not Annotated:
        return None
    kind, limit = parts
    if get_origin(kind) is list:
        wanted = _wanted(kind, value)
        return wanted or (None if len(value) in limit else f"a list of {limit} values")
    if limit.auto and value == AUTO:
        return None
    whole = kind is int
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if is_number and value in limit:
        return None
    return f"a {'whole ' if whole else ''}number, {limit}{f', or {AUTO}' if limit.auto else ''}"
