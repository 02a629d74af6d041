"""What the checks of the kernels share."""

import os

import torch
from torch import Tensor

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
# What rounding leaves of numbers of about 1, to the scale of the largest of a result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = list(TOLERANCE)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Of about 1."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)
