"""The ranges of all numeric options, as part of their fields' types (`steps: DraftSize = 6`). Hydra
sees the plain types. A `Ranged` dataclass checks its values when it is created; the command line
checks them before, to name the option as the user wrote it."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import EnumMeta
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kangaroo.utils.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Finite numbers between inclusive (`least`, `most`) or exclusive (`above`, `below`) bounds;
    with `auto`, also the word "auto". For a list, the range of its length."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    auto: bool = False

    def __contains__(self, number: float) -> bool:
        inside = self.least <= number <= self.most and self.above < number < self.below
        return inside and abs(number) != math.inf

    def __str__(self) -> str:
        bounds = {"{} or more": self.least, "above {}": self.above}
        bounds |= {"at most {}": self.most, "below {}": self.below}
        return " and ".join(text.format(x) for text, x in bounds.items() if math.isfinite(x))


AUTO = "auto"
MOST = (1 << 31) - 1  # the largest 32-bit integer, as in native code
SEEDS = 1 << 63  # seeds of texts lie in [-SEEDS, SEEDS), the range of 64-bit integers

Count = Annotated[int, Range(1, MOST)]
CountOrZero = Annotated[int, Range(0, MOST)]
TextLength = Annotated[int, Range(2, MOST)]  # in tokens; training predicts all but the first
Index = Annotated[int, Range(-MOST, MOST)]  # of a list; negative indices count from its end
Seed = Annotated[int, Range(0, (1 << 32) - 1)]  # numpy's; `seed * 1_000_003 + i` is a TextSeed
TextSeed = Annotated[int, Range(-SEEDS, SEEDS - 1)]
NoiseSeed = Annotated[int, Range(-SEEDS, SEEDS - 1 - MOST)]  # each row adds its index
MOST_NODES = 1024  # of a draft, whose mask is quadratic in them; each takes a slot in every row
DraftSize = Annotated[int, Range(1, MOST_NODES)]
Layers = Annotated[int, Range(1, 1024)]  # more than any model has
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Chance = Annotated[float, Range(0, 1)]
Threshold = Annotated[float, Range(0, below=1)]  # at 1 no confidence would suffice
AutoThreshold = Annotated[float | int | str, Range(0, below=1, auto=True)]  # to Hydra 0 is an int
Share = Annotated[float, Range(above=0, most=1)]
Filled = Annotated[list[T], Range(1)]


class Ranged:
    """A dataclass of options whose values are checked against their ranges."""

    def __post_init__(self) -> None:
        check(type(self), vars(self), f"{type(self).__name__}.")


def check_nodes(count: int, **options: int) -> None:
    """Errors: `ConfigError` where a drafter's options make more nodes than a draft may have."""
    if count > MOST_NODES:
        settings = ", ".join(f"drafter.{name}={value}" for name, value in options.items())
        raise ConfigError(f"{settings} make {count} nodes, over {MOST_NODES}. Lower one.")


def check(kind: type, values: Mapping[str, Any], prefix: str = "") -> None:
    """Check values against the ranges of a dataclass's fields. Errors: `ConfigError` names the
    first invalid field and its range, after a `prefix` such as "trainer."."""
    for name, hint in _type_hints(kind).items():
        if name in values and not _fits(hint, values[name]):
            raise ConfigError(f"{prefix}{name}={values[name]!r} must be {requirement(hint)}.")


_type_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


def requirement(hint: Any) -> str:
    """What a type hint requires of a value, in words; empty where any value will do."""
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin in (Union, UnionType) and NoneType in parts:
        (inner,) = (part for part in parts if part is not NoneType)
        return f"{requirement(inner)}, or null" if requirement(inner) else "or null"
    if origin in (list, tuple):
        part = requirement(parts[0])
        return f"a list, each {part}" if part else "a list"
    if isinstance(hint, EnumMeta):
        return f"one of: {', '.join(hint.__members__)}"
    if origin is not Annotated:
        return "true or false" if hint is bool else ""
    kind, limit = parts
    if get_origin(kind) is list:
        return f"{requirement(kind)}, of {limit} values"
    number = "a whole number" if kind is int else "a number"
    return f"{number}, {limit}{f', or {AUTO}' if limit.auto else ''}"


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value is in the range of a type hint; other types are checked by Hydra."""
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin in (Union, UnionType) and NoneType in parts:
        return value is None or any(_fits(part, value) for part in parts if part is not NoneType)
    if origin in (list, tuple):
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and all(_fits(parts[min(i, len(parts) - 1)], x) for i, x in enumerate(value))
    if origin is not Annotated:
        return True
    kind, limit = parts
    if get_origin(kind) is list:
        return _fits(kind, value) and len(value) in limit
    is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return (limit.auto and value == AUTO) or (is_number and value in limit)
