# mypy: disable-error-code="no-untyped-def"
"""What whole texts need between the products of a layer, beside norms.

Shapes: N tokens, T of a row, H heads, D head size, O outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kangaroo.cuda.kernels import read, rounded, wait, write


@triton.jit(do_not_specialize=["T", "ROW"])
def rotate_kernel(
    x_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    T,
    ROW,
    eps,
    H: tl.constexpr,
    HP: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries or keys `[N, H, D]`, normed where there is a norm, and rotated, in their place.
    Programs: N.

    Args:
        ROW: from one row's cosines `[T, D]` to the next one's.
    """
    wait(PDL)
    n = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, HP)[:, None], tl.arange(0, HALF)[None, :]
    half = D // 2
    at, inside = (n * H + head) * D + d, (head < H) & (d < half)
    a, b = read(x_ptr + at, inside).to(tl.float32), read(x_ptr + at + half, inside).to(tl.float32)
    if NORMS:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        a = rounded(a * factor, x_ptr.dtype.element_ty).to(tl.float32)
        b = rounded(b * factor, x_ptr.dtype.element_ty).to(tl.float32)
        a *= read(norm_ptr + d, d < half).to(tl.float32)
        b *= read(norm_ptr + d + half, d < half).to(tl.float32)
        a = rounded(a, x_ptr.dtype.element_ty).to(tl.float32)
        b = rounded(b, x_ptr.dtype.element_ty).to(tl.float32)
    turn = (n // T) * ROW + (n % T) * D + d
    cos = read(cos_ptr + turn, d < half).to(tl.float32)
    sin = read(sin_ptr + turn, d < half).to(tl.float32)
    write(x_ptr + at, a * cos - b * sin, inside)
    write(x_ptr + at + half, b * cos + a * sin, inside)


@triton.jit(do_not_specialize=["NUMBERS"])
def gate_kernel(gate_ptr, up_ptr, NUMBERS, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """`silu(gate) * up`, `[N, O]`, in the place of the gate. Programs: blocks of numbers."""
    wait(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = read(gate_ptr + at, at < NUMBERS).to(tl.float32)
    up = read(up_ptr + at, at < NUMBERS).to(tl.float32)
    write(gate_ptr + at, gate * tl.sigmoid(gate) * up, at < NUMBERS)
