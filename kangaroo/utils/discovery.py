"""Finds classes by the modules that define them, so that nothing has to be registered."""

import inspect
import pkgutil
from functools import cache
from importlib import import_module
from typing import TypeVar

Kind = TypeVar("Kind")


@cache
def classes(package: str, base: type[Kind]) -> dict[str, type[Kind]]:
    """The concrete subclass of `base` in each module of a package that defines one, by module."""
    by_module = {}
    for info in pkgutil.iter_modules(import_module(package).__path__):
        module = import_module(f"{package}.{info.name}")
        for value in vars(module).values():
            is_defined_here = inspect.isclass(value) and value.__module__ == module.__name__
            if is_defined_here and issubclass(value, base) and not inspect.isabstract(value):
                by_module[info.name] = value
    return by_module
