"""Lossless self-speculative decoding: begin with `kangaroo.load` (see `kangaroo/api.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kangaroo.api import Model, load

__all__ = ["Model", "load"]


def __getattr__(name: str) -> Any:
    """Imported when first used (PEP 562), so that `import kangaroo` alone loads no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'kangaroo' has no attribute '{name}'")
    from kangaroo import api

    return getattr(api, name)
