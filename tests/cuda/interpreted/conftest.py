"""Checks of the Triton kernels: in Triton's interpreter (`TRITON_INTERPRET=1`, which is read when
Triton is imported, so in a process of its own: `tests/cuda/test_cuda.py`), or on a GPU.

The interpreter puts its own functions into Triton's modules for every function that a kernel calls,
which takes most of its time. Here it does so once a launch.
"""

import os
from types import SimpleNamespace

import pytest
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: original(both)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **named: self.rewrite()(
        *args, **named
    )


@pytest.fixture(autouse=True)
def no_gradients():
    import torch

    with torch.no_grad():
        yield
