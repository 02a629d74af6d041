"""What the checks of the kernels share.

Shapes: N tokens, T of a row, H query heads, G key heads, D head size, S slots of a row.
"""

from __future__ import annotations

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


def assert_close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Equal but for what this format rounds away."""
    scale = exact.abs().max().item()
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCE[dtype] * scale)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def exact_attention(q_HD: Tensor, k_EGD: Tensor, v_EGD: Tensor, scale: float) -> Tensor:
    """Of one token that sees all keys, `[H, D]` in float64."""
    group = len(q_HD) // k_EGD.shape[1]
    k_EHD, v_EHD = (x.double().repeat_interleave(group, 1) for x in (k_EGD, v_EGD))
    weights_HE = (torch.einsum("hd,ehd->he", q_HD.double(), k_EHD) * scale).softmax(-1)
    return torch.einsum("he,ehd->hd", weights_HE, v_EHD)
