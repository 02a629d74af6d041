"""Checks of the Triton kernels: in Triton's interpreter (`TRITON_INTERPRET=1`, which is read when
Triton is imported, so in a process of its own: `tests/cuda/test_cuda.py`), or on a GPU.

The interpreter puts its own functions into Triton's modules for every function that a kernel calls,
which takes most of its time. Here it does so once a launch, and does not check for each sum of two
whole numbers that it fits. Its products are BLAS's, where the order of a sum depends on the row and
on the shape; here, as on a GPU, it does not.
"""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETED:
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: original(both)
    interpreter.InterpretedFunction.__call__ = lambda self, *of, **how: self.rewrite()(*of, **how)

    def dot(self, a, b, d, *options):
        """Sums in the order of the inputs. Most rows are no token, and zero."""
        rows = a.data.any(1)
        products = a.data[rows].astype(np.float32)[:, :, None] * b.data.astype(np.float32)
        sums = d.data.copy()
        sums[rows] += np.add.reduce(products, 1)
        return interpreter.TensorHandle(sums, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


@pytest.fixture(autouse=True)
def no_gradients():
    import torch

    with torch.no_grad():
        yield
