"""Lossless self-speculative decoding: begin with `kangaroo.load` (see `kangaroo/api.py`).

What `__init__.pyi` imports, for type checkers, is imported here when it is first used (PEP 562), so
that `import kangaroo` alone loads no torch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "1.0.0"
_imports = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
_homes = {x.names[0].name: x.module for x in _imports if isinstance(x, ast.ImportFrom) and x.module}
__all__ = list(_homes)


def __getattr__(name: str) -> Any:
    if name not in _homes:
        raise AttributeError(f"module 'kangaroo' has no attribute '{name}'")
    return getattr(import_module(_homes[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
