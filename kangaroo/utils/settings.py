"""Settings given by name in Python: their names and types, by the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kangaroo.utils.errors import ConfigError

Settings = TypeVar("Settings")


def build(kind: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """Make the dataclass with these fields.

    Errors: `ConfigError` for a field that it has not, or a value of another type.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    hints, values = get_type_hints(kind), {}
    for name, value in settings.items():
        if name not in names:
            raise ConfigError(
                f"there is no setting '{name}'; {kind.__name__} has {', '.join(names)}."
            )
        values[name] = typed(name, value, hints[name])
    return kind(**values)


def typed(name: str, value: Any, hint: Any) -> Any:
    """A value that fits a type such as `int | None`, numbers of numpy as those of Python. A bool is
    no number, and what a list holds is not looked at.

    Errors: `ConfigError` for a value of another type.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if kind is int and is_number and isinstance(value, Integral):
            return int(value)
        if kind is float and is_number:
            return value if isinstance(value, int) else float(value)
        if kind is Any or (
            kind not in (int, float) and isinstance(value, get_origin(kind) or kind)
        ):
            return value
    takes = hint.__name__ if isinstance(hint, type) else hint
    raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; it takes {takes}.")
