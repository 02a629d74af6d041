# mypy: disable-error-code="no-untyped-def"
"""Functions for all kernels, and kernels beside products and attention: norms, and for whole texts
rotation.

Every kernel computes the same bits for a token, whatever else is in the batch. Sums are in fixed
blocks in a fixed order, and programs are not specialised for counts of tokens, rows and slots
(`do_not_specialize`).

Triton's interpreter silently has no bfloat16 arithmetic. So `numbers` are float32 there, and
`rounded` and `write` round as a GPU does.

Shapes: N tokens, T of a row, K inputs, P parts of a sum, H heads, D head size.
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# kernels can read only globals that are constexpr
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def wait(PDL: tl.constexpr):
    """Called in every kernel before it reads what others write: wait until the kernel before has
    ended and its writes are visible, then let the next kernel start, which waits here in turn."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def tree_sum(x):
    """The sums of the rows of `[M, W]`, with W a power of two. Halves are added to each other, so
    that the order does not depend on which thread has which number."""
    M: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    for level in tl.static_range(10):
        if W >> level > 1:
            x = tl.sum(tl.reshape(x, [M, 2, W >> (level + 1)]), 1)
    return tl.reshape(x, [M])


@triton.jit
def numbers(x):
    """Loaded values in a format that arithmetic works with."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def read(pointers, mask):
    """Load `numbers`, 0 where masked."""
    return numbers(tl.load(pointers, mask=mask, other=0.0))


@triton.jit
def rounded(x, FORMAT: tl.constexpr):
    """Float32 rounded to a format, to nearest even."""
    if INTERPRETED and tl.bfloat16 == FORMAT:
        bits = x.to(tl.uint32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), float("nan"))
    else:
        return x.to(FORMAT)


@triton.jit
def write(pointers, x, mask):
    """Store float32 in the format of the destination."""
    x = rounded(x, pointers.dtype.element_ty)
    if INTERPRETED and pointers.dtype.element_ty == tl.bfloat16:
        bits = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)
        x = bits.to(tl.bfloat16, bitcast=True)
    tl.store(pointers, x, mask=mask)


@triton.jit(do_not_specialize=["N"])
def norm_kernel(
    x_ptr, part_ptr, weight_ptr, sum_ptr, normed_ptr, N, STRIDE, eps,
    K: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`sum = x + parts`, with parts `[P, N, K]` added in order, then its norm if NORMS. Without
    PARTS there is only the norm of x. STRIDE is that of `normed` between tokens. Programs: N."""
    wait(PDL)
    n, k = tl.program_id(0).to(tl.int64), tl.arange(0, BK)
    inside = k < K
    x = read(x_ptr + n * K + k, inside).to(tl.float32)
    if PARTS > 0:
        total = tl.zeros([BK], tl.float32)
        for part in tl.static_range(PARTS):
            total += read(part_ptr + (part * N + n) * K + k, inside)
        x = rounded(x + total, sum_ptr.dtype.element_ty).to(tl.float32)
        write(sum_ptr + n * K + k, x, inside)
    if NORMS:
        factor = tl.rsqrt(tl.sum(x * x) / K + eps)
        normed = rounded(x * factor, normed_ptr.dtype.element_ty).to(tl.float32)
        weight = read(weight_ptr + k, inside).to(tl.float32)
        write(normed_ptr + n * STRIDE + k, normed * weight, inside)


@triton.jit(do_not_specialize=["T", "ROW"])
def rotate_kernel(
    x_ptr, norm_ptr, cos_ptr, sin_ptr, T, ROW, eps, H: tl.constexpr, HP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm queries or keys `[N, H, D]` if NORMS, and rotate them, in place. ROW is the stride
    between the cosines `[T, D]` of rows. Programs: N."""
    wait(PDL)
    n = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, HP)[:, None], tl.arange(0, HALF)[None, :]
    half = D // 2
    FORMAT: tl.constexpr = x_ptr.dtype.element_ty
    offset, inside = (n * H + head) * D + d, (head < H) & (d < half)
    a = read(x_ptr + offset, inside).to(tl.float32)
    b = read(x_ptr + offset + half, inside).to(tl.float32)
    if NORMS:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        norm1 = read(norm_ptr + d, d < half).to(tl.float32)
        norm2 = read(norm_ptr + d + half, d < half).to(tl.float32)
        a = rounded(rounded(a * factor, FORMAT).to(tl.float32) * norm1, FORMAT).to(tl.float32)
        b = rounded(rounded(b * factor, FORMAT).to(tl.float32) * norm2, FORMAT).to(tl.float32)
    rope_offset = (n // T) * ROW + (n % T) * D + d
    cos = read(cos_ptr + rope_offset, d < half).to(tl.float32)
    sin = read(sin_ptr + rope_offset, d < half).to(tl.float32)
    write(x_ptr + offset, a * cos - b * sin, inside)
    write(x_ptr + offset + half, b * cos + a * sin, inside)
