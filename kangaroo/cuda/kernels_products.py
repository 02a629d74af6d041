# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: E741, SIM102 (Triton takes no constant beside an `and`)
"""Products of tokens and weights: one loop, whose instructions have tokens as rows.

A program has BO outputs of TOKENS tokens. TOKENS is a number of whole instructions, and a row of an
instruction depends on no other row. The inputs are taken in one order, BK at a time. So a token's
bits are the same at every width.

Shapes: N tokens, K inputs, O outputs, P parts over the inputs, H query heads, G key heads, D head
size, B tiles of the outputs.
"""

import triton
import triton.language as tl

from kangaroo.cuda.kernels import numbers, read, rounded, tree_sum, wait, write

PREFETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")
PREFETCHED = tl.constexpr(4)  # steps of a product whose weights are asked for before the wait


@triton.jit
def is_needed(needed_ptr):
    """0 if nobody needs what a kernel computes (`Backend.skip_unless`); None is always needed."""
    return tl.load(needed_ptr) if needed_ptr is not None else 1


@triton.jit
def begin(needed_ptr, row_ptrs, first, K: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr):
    """Ask for the weights of the first steps from input `first` on, in the second-level cache. They
    do not depend on the kernel before, so this comes ahead of the wait for it, and `is_needed`."""
    if PDL:
        for step in tl.static_range(PREFETCHED):
            pointers = row_ptrs + tl.minimum(first + step * BK, K - 1)
            tl.inline_asm_elementwise(PREFETCH, "=r,l", [pointers.to(tl.int64)], tl.int32, False, 1)
    wait(PDL)
    return is_needed(needed_ptr)


@triton.jit
def sums_of(
    x_ptr, N, row_ptrs, part, K: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Products `[TOKENS, BO]` of the program's tokens and rows of weights, over a part of the
    inputs."""
    STEPS: tl.constexpr = (K + BK * PARTS - 1) // (BK * PARTS)
    cols = part * STEPS * BK + tl.arange(0, BK)
    tokens = tl.arange(0, TOKENS)  # 32 bits, since pointers to all of them would not fit registers
    x_ptr += tl.program_id(0).to(tl.int64) * TOKENS * K
    x_ptrs = x_ptr + (tokens[:, None] * K + cols[None, :])
    w_ptrs = row_ptrs[:, None] + cols[None, :]
    is_token = (tl.program_id(0) * TOKENS + tokens < N)[:, None]
    sums = tl.zeros([TOKENS, row_ptrs.shape[0]], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = step * BK
        if K % (BK * PARTS) == 0:
            x = tl.load(x_ptrs + k, mask=is_token, other=0.0)
            w = tl.load(w_ptrs + k)
        else:
            inside = (cols + k < K)[None, :]
            x = tl.load(x_ptrs + k, mask=is_token & inside, other=0.0)
            w = tl.load(w_ptrs + k, mask=inside, other=0.0)
        sums = tl.dot(numbers(x), tl.trans(numbers(w)), sums, input_precision="ieee")
    return sums


@triton.jit
def halves(sums):
    """The even and the odd columns, which the same thread has."""
    return tl.split(tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]))


@triton.jit(do_not_specialize=["N"])
def linear_kernel(
    x_ptr, needed_ptr, w_ptr, bias_ptr, y_ptr, N, O, K: tl.constexpr, PARTS: tl.constexpr,
    FOLDS: tl.constexpr, BIASED: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Products `[P, N, O]`, each part over its share of the inputs; with FOLDS their sum, in order,
    `[1, N, O]`. Programs: tokens, tiles, P."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * BO + tl.arange(0, BO)
    part = tl.program_id(2)
    row_ptrs = w_ptr + tl.minimum(rows, O - 1).to(tl.int64) * K
    if begin(needed_ptr, row_ptrs, part * tl.cdiv(K, BK * PARTS) * BK, K, BK, PDL) == 0:
        return
    y = tl.zeros([TOKENS, BO], tl.float32)
    if BIASED:
        bias = read(bias_ptr + rows, rows < O).to(tl.float32)
        y += tl.where(part == 0, bias, 0.0)[None, :]
    if FOLDS:
        for each in tl.range(0, PARTS):
            y += sums_of(x_ptr, N, row_ptrs, each, K, PARTS, BK, TOKENS, STAGES)
    else:
        y += sums_of(x_ptr, N, row_ptrs, part, K, PARTS, BK, TOKENS, STAGES)
    offset = (part * N + tokens[:, None]).to(tl.int64) * O + rows[None, :]
    write(y_ptr + offset, y, (tokens < N)[:, None] & (rows < O)[None, :])


@triton.jit(do_not_specialize=["N"])
def gate_up_kernel(
    x_ptr, needed_ptr, gate_ptr, up_ptr, y_ptr, N, O, K: tl.constexpr, ALIGNED: tl.constexpr,
    BO: tl.constexpr, BK: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`silu(gate x) * up x`, `[N, O]`. Programs: tokens, tiles. A tile has rows of both matrices in
    turn; ALIGNED says that each begins at a multiple of 16 bytes."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.arange(0, BO)
    row = tl.minimum(tl.program_id(1) * (BO // 2) + place // 2, O - 1)
    row_ptrs = tl.where(place % 2 == 0, gate_ptr, up_ptr) + row.to(tl.int64) * K
    if ALIGNED:
        row_ptrs = tl.multiple_of(row_ptrs, 16)
    if begin(needed_ptr, row_ptrs, 0, K, BK, PDL) == 0:
        return
    sums = sums_of(x_ptr, N, row_ptrs, 0, K, 1, BK, TOKENS, STAGES)
    gate, up = halves(sums)
    gate = rounded(gate, y_ptr.dtype.element_ty).to(tl.float32)
    columns = tl.program_id(1) * (BO // 2) + tl.arange(0, BO // 2)
    offset = tokens[:, None].to(tl.int64) * O + columns[None, :]
    inside = (tokens < N)[:, None] & (columns < O)[None, :]
    write(y_ptr + offset, gate * tl.sigmoid(gate) * up, inside)


@triton.jit(do_not_specialize=["N", "T", "S"])
def qkv_kernel(
    x_ptr, needed_ptr, q_weight_ptr, k_weight_ptr, v_weight_ptr, q_bias_ptr, k_bias_ptr, v_bias_ptr,
    q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, slot_ptr, count_ptr, q_ptr, keys_ptr, values_ptr, S,
    N, T, eps, H: tl.constexpr, G: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, BIASED: tl.constexpr, NORMS: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr,
    TOKENS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Queries `[N, H, D]`, and keys and values at the tokens' slots of the cache. Programs: tokens,
    tiles of heads. A tile has BO / 2 numbers of a head's first half and those of its second half,
    in turn, since they rotate together; with norms it has the whole head.

    Args:
        slot_ptr: each token's slot within its row; rows have T tokens and S slots.
        count_ptr: 0 for padding, which writes nothing to the cache.
        FIRST: the first head; H leaves queries out.
    """
    HALF: tl.constexpr = D // 2
    TILES: tl.constexpr = (HALF + BO // 2 - 1) // (BO // 2)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1) // TILES + FIRST
    w_ptr, bias_ptr, norm_ptr, out_ptr, h = q_weight_ptr, q_bias_ptr, q_norm_ptr, q_ptr, head
    if head >= H:
        w_ptr, bias_ptr, norm_ptr, out_ptr = k_weight_ptr, k_bias_ptr, k_norm_ptr, keys_ptr
        h = head - H
    if head >= H + G:
        w_ptr, bias_ptr, out_ptr = v_weight_ptr, v_bias_ptr, values_ptr
        h = head - H - G
    place = tl.arange(0, BO)
    tile = tl.program_id(1) % TILES * (BO // 2)
    row = h * D + tl.minimum(tile + place // 2, HALF - 1) + place % 2 * HALF
    row_ptrs = w_ptr + row.to(tl.int64) * K
    if begin(needed_ptr, row_ptrs, 0, K, BK, PDL) == 0:
        return
    sums = sums_of(x_ptr, N, row_ptrs, 0, K, 1, BK, TOKENS, STAGES)
    a, b = halves(sums)
    d = tile + tl.arange(0, BO // 2)
    inside_head = d < HALF
    FORMAT: tl.constexpr = q_ptr.dtype.element_ty
    if BIASED:
        a += read(bias_ptr + h * D + d, inside_head).to(tl.float32)[None, :]
        b += read(bias_ptr + h * D + d + HALF, inside_head).to(tl.float32)[None, :]
    a, b = rounded(a, FORMAT).to(tl.float32), rounded(b, FORMAT).to(tl.float32)
    inside = (tokens < N)[:, None] & inside_head[None, :]
    if NORMS:
        if head < H + G:
            squares = tl.where(inside_head[None, :], a * a + b * b, 0.0)
            factor = tl.rsqrt(tree_sum(squares) / D + eps)[:, None]
            norm1 = read(norm_ptr + d, inside_head).to(tl.float32)[None, :]
            norm2 = read(norm_ptr + d + HALF, inside_head).to(tl.float32)[None, :]
            a = rounded(rounded(a * factor, FORMAT).to(tl.float32) * norm1, FORMAT).to(tl.float32)
            b = rounded(rounded(b * factor, FORMAT).to(tl.float32) * norm2, FORMAT).to(tl.float32)
    if head < H + G:
        offset = tokens[:, None].to(tl.int64) * D + d[None, :]
        cos = read(cos_ptr + offset, inside).to(tl.float32)
        sin = read(sin_ptr + offset, inside).to(tl.float32)
        a, b = a * cos - b * sin, b * cos + a * sin
    at = tokens.to(tl.int64)
    heads = H
    if head >= H:
        is_token = tl.load(count_ptr + tokens, mask=tokens < N, other=0) > 0
        slot = tl.load(slot_ptr + tokens, mask=tokens < N, other=0).to(tl.int64)
        at = (tokens // T).to(tl.int64) * S + slot
        inside = inside & is_token[:, None]
        heads = G
    offset = (at * heads + h)[:, None] * D + d[None, :]
    write(out_ptr + offset, a, inside)
    write(out_ptr + offset + HALF, b, inside)


@triton.jit(do_not_specialize=["N"])
def choose_kernel(
    x_ptr, needed_ptr, w_ptr, best_ptr, id_ptr, N, O, B, K: tl.constexpr, BO: tl.constexpr,
    BK: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For each tile of an LM head the largest logit and the sum of exponentials relative to it,
    `best` `[N, 2, B]`, and that logit's output, `id` `[N, B]`. Programs: tokens, B."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    tile = tl.program_id(1)
    rows = tile * BO + tl.arange(0, BO)
    row_ptrs = w_ptr + tl.minimum(rows, O - 1).to(tl.int64) * K
    if begin(needed_ptr, row_ptrs, 0, K, BK, PDL) == 0:
        return
    sums = sums_of(x_ptr, N, row_ptrs, 0, K, 1, BK, TOKENS, STAGES)
    logits = tl.where((rows < O)[None, :], sums, float("-inf"))
    top = tl.max(logits, 1)
    top_id = tl.min(tl.where(logits == top[:, None], rows[None, :], O), 1)
    pointers = best_ptr + tokens.to(tl.int64) * 2 * B + tile
    tl.store(pointers, top, mask=tokens < N)
    tl.store(pointers + B, tree_sum(tl.exp(logits - top[:, None])), mask=tokens < N)
    tl.store(id_ptr + tokens.to(tl.int64) * B + tile, top_id, mask=tokens < N)


@triton.jit
def choice_kernel(
    best_ptr, needed_ptr, id_ptr, token_ptr, chosen_ptr, chance_ptr, B, O,
    BB: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The likeliest token over all tiles, `chosen` `[N]`, the first of equal ones, and its
    probability, `chance` `[N]`. With LISTED, `token` are the outputs' tokens, ascending. BB is B
    rounded up to a power of two. Programs: N."""
    n, tile = tl.program_id(0).to(tl.int64), tl.arange(0, BB)
    wait(PDL)
    if is_needed(needed_ptr) == 0:
        tl.store(chosen_ptr + n, 0)  # the next pass reads its embedding
        return
    inside = tile < B
    best_ptr += n * 2 * B
    tops = tl.load(best_ptr + tile, mask=inside, other=float("-inf"))
    totals = tl.load(best_ptr + B + tile, mask=inside, other=0.0)
    ids = tl.load(id_ptr + n * B + tile, mask=inside, other=O)
    top = tl.max(tops)
    top_id = tl.min(tl.where(tops == top, ids, O))
    if LISTED:
        top_id = tl.load(token_ptr + top_id)
    tl.store(chosen_ptr + n, top_id)
    tl.store(chance_ptr + n, 1 / tl.sum(totals * tl.exp(tops - top)))
