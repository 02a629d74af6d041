# mypy: disable-error-code="no-untyped-def,assignment"
# ruff: noqa: E741, RUF005, SIM102 (Triton takes no starred tuple, nor a constant beside an `and`)
"""Products of weights and a few tokens; every weight is read once for up to 64 tokens.

The first operand is always weights, and the second 16 tokens, since instructions with more columns
sum in another order. More tokens have further accumulators of 16, or other programs.

Shapes: N tokens, K inputs, O outputs, P parts over the inputs, H query heads, G key heads, D head
size, B tiles of the outputs. A program has BO outputs of TOKENS tokens, and reads BK inputs at a
time.
"""

import triton
import triton.language as tl

from kangaroo.cuda.kernels import numbers, read, rounded, wait, write


@triton.jit
def zeros(BO: tl.constexpr, COUNT: tl.constexpr):
    """`COUNT` accumulators of 16 tokens."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([BO, 16], tl.float32),)
    return sums


@triton.jit
def weights(w_ptr, rows, O, k, K: tl.constexpr, BK: tl.constexpr):
    """Inputs k to k + BK of these rows of a matrix `[O, K]`."""
    cols = k + tl.arange(0, BK)
    inside = (rows < O)[:, None] & (cols < K)[None, :]
    pointers = w_ptr + rows[:, None].to(tl.int64) * K + cols[None, :]
    return numbers(tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first"))


@triton.jit
def inputs(x_ptr, first, N, k, K: tl.constexpr, BK: tl.constexpr):
    """Inputs k to k + BK of 16 tokens from `first` on, `[BK, 16]`."""
    cols = k + tl.arange(0, BK)
    tokens = first + tl.arange(0, 16)
    inside = (cols < K)[:, None] & (tokens < N)[None, :]
    return read(x_ptr + tokens[None, :].to(tl.int64) * K + cols[:, None], inside)


@triton.jit
def add(sums, matrices, x_ptr, first, N, k, K: tl.constexpr, BK: tl.constexpr):
    """Add products of weights and tokens to accumulators: one for 16 tokens and a matrix."""
    MATRICES: tl.constexpr = len(matrices)
    added = ()
    for i in tl.static_range(len(sums) // MATRICES):
        x = inputs(x_ptr, first + 16 * i, N, k, K, BK)
        for j in tl.static_range(MATRICES):
            total = tl.dot(matrices[j], x, sums[i * MATRICES + j], input_precision="ieee")
            added = added + (total,)
    return added


@triton.jit(do_not_specialize=["N"])
def linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    N,
    O,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Products `[P, N, O]`, each part over its share of the inputs. Programs: tiles, P, tokens."""
    wait(PDL)
    rows = tl.program_id(0) * BO + tl.arange(0, BO)
    part, first = tl.program_id(1), tl.program_id(2) * TOKENS
    STEPS: tl.constexpr = (K + BK * PARTS - 1) // (BK * PARTS)
    sums = zeros(BO, TOKENS // 16)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = (part * STEPS + step) * BK
        sums = add(sums, (weights(w_ptr, rows, O, k, K, BK),), x_ptr, first, N, k, K, BK)
    for i in tl.static_range(TOKENS // 16):
        y = sums[i]
        if BIASED:
            bias = read(bias_ptr + rows, rows < O).to(tl.float32)
            y += tl.where(part == 0, bias, 0.0)[:, None]
        tokens = first + 16 * i + tl.arange(0, 16)
        offset = (part * N + tokens[None, :]).to(tl.int64) * O + rows[:, None]
        write(y_ptr + offset, y, (rows < O)[:, None] & (tokens < N)[None, :])


@triton.jit(do_not_specialize=["N"])
def gate_up_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    y_ptr,
    N,
    O,
    K: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """`silu(gate x) * up x`, `[N, O]`. Programs: tiles, tokens."""
    wait(PDL)
    rows = tl.program_id(0) * BO + tl.arange(0, BO)
    first = tl.program_id(1) * TOKENS
    sums = zeros(BO, 2 * TOKENS // 16)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        both = weights(gate_ptr, rows, O, k, K, BK), weights(up_ptr, rows, O, k, K, BK)
        sums = add(sums, both, x_ptr, first, N, k, K, BK)
    for i in tl.static_range(TOKENS // 16):
        gate = rounded(sums[2 * i], y_ptr.dtype.element_ty).to(tl.float32)
        tokens = first + 16 * i + tl.arange(0, 16)
        inside = (rows < O)[:, None] & (tokens < N)[None, :]
        offset = tokens[None, :].to(tl.int64) * O + rows[:, None]
        write(y_ptr + offset, gate * tl.sigmoid(gate) * sums[2 * i + 1], inside)


@triton.jit(do_not_specialize=["N", "T", "S"])
def qkv_kernel(
    x_ptr,
    q_weight_ptr,
    k_weight_ptr,
    v_weight_ptr,
    q_bias_ptr,
    k_bias_ptr,
    v_bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    count_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    S,
    N,
    T,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    FIRST: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BIASED: tl.constexpr,
    NORMS: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Queries `[N, H, D]`, and keys and values at the tokens' slots of the cache. Programs: tiles
    of heads, tokens. A tile has BO numbers of a head's first half and the same of its second half,
    which rotate together; with norms it has the whole head.

    Args:
        slot_ptr: each token's slot within its row; rows have T tokens and S slots.
        count_ptr: 0 for padding, which writes nothing to the cache.
        FIRST: the first head; H leaves queries out.
    """
    wait(PDL)
    HALF: tl.constexpr = D // 2
    TILES: tl.constexpr = (HALF + BO - 1) // BO
    head = tl.program_id(0) // TILES + FIRST
    d = tl.program_id(0) % TILES * BO + tl.arange(0, BO)
    first = tl.program_id(1) * TOKENS
    w_ptr, bias_ptr, norm_ptr, out_ptr, h = q_weight_ptr, q_bias_ptr, q_norm_ptr, q_ptr, head
    if head >= H:
        w_ptr, bias_ptr, norm_ptr, out_ptr = k_weight_ptr, k_bias_ptr, k_norm_ptr, keys_ptr
        h = head - H
    if head >= H + G:
        w_ptr, bias_ptr, out_ptr = v_weight_ptr, v_bias_ptr, values_ptr
        h = head - H - G
    heads = tl.where(head < H, H, G)
    inside_head = d < HALF
    rows = tl.where(inside_head, h * D + d, heads * D)  # the matrix ends there
    sums = zeros(BO, 2 * TOKENS // 16)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        w1 = weights(w_ptr, rows, heads * D, k, K, BK)
        w2 = weights(w_ptr, rows + HALF, heads * D, k, K, BK)
        sums = add(sums, (w1, w2), x_ptr, first, N, k, K, BK)
    FORMAT: tl.constexpr = q_ptr.dtype.element_ty
    for i in tl.static_range(TOKENS // 16):
        a, b = sums[2 * i], sums[2 * i + 1]
        if BIASED:
            a += read(bias_ptr + rows, inside_head).to(tl.float32)[:, None]
            b += read(bias_ptr + rows + HALF, inside_head).to(tl.float32)[:, None]
        a, b = rounded(a, FORMAT).to(tl.float32), rounded(b, FORMAT).to(tl.float32)
        tokens = first + 16 * i + tl.arange(0, 16)
        inside = inside_head[:, None] & (tokens < N)[None, :]
        if NORMS:
            if head < H + G:
                factor = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / D + eps)[None, :]
                norm1 = read(norm_ptr + d, inside_head).to(tl.float32)[:, None]
                norm2 = read(norm_ptr + d + HALF, inside_head).to(tl.float32)[:, None]
                a = rounded(rounded(a * factor, FORMAT).to(tl.float32) * norm1, FORMAT)
                b = rounded(rounded(b * factor, FORMAT).to(tl.float32) * norm2, FORMAT)
                a, b = a.to(tl.float32), b.to(tl.float32)
        if head < H + G:
            offset = tokens[None, :].to(tl.int64) * D + d[:, None]
            cos = read(cos_ptr + offset, inside).to(tl.float32)
            sin = read(sin_ptr + offset, inside).to(tl.float32)
            a, b = a * cos - b * sin, b * cos + a * sin
        place = tokens.to(tl.int64)
        if head >= H:
            is_token = tl.load(count_ptr + tokens, mask=tokens < N, other=0) > 0
            slot = tl.load(slot_ptr + tokens, mask=tokens < N, other=0).to(tl.int64)
            place = (tokens // T).to(tl.int64) * S + slot
            inside = inside & is_token[None, :]
        offset = (place * heads + h)[None, :] * D + d[:, None]
        write(out_ptr + offset, a, inside)
        write(out_ptr + offset + HALF, b, inside)


@triton.jit(do_not_specialize=["N"])
def choose_kernel(
    x_ptr,
    w_ptr,
    best_ptr,
    id_ptr,
    N,
    O,
    B,
    K: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """For each tile of an LM head the largest logit and the sum of exponentials relative to it,
    `best` `[N, 2, B]`, and that logit's output, `id` `[N, B]`. Programs: B, tokens."""
    wait(PDL)
    tile, first = tl.program_id(0), tl.program_id(1) * TOKENS
    rows = tile * BO + tl.arange(0, BO)
    sums = zeros(BO, TOKENS // 16)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        sums = add(sums, (weights(w_ptr, rows, O, k, K, BK),), x_ptr, first, N, k, K, BK)
    for i in tl.static_range(TOKENS // 16):
        logits = tl.where((rows < O)[:, None], sums[i], float("-inf"))
        top = tl.max(logits, 0)
        top_id = tl.min(tl.where(logits == top[None, :], rows[:, None], O), 0)
        tokens = (first + 16 * i + tl.arange(0, 16)).to(tl.int64)
        pointers = best_ptr + tokens * 2 * B + tile
        tl.store(pointers, top, mask=tokens < N)
        tl.store(pointers + B, tl.sum(tl.exp(logits - top[None, :]), 0), mask=tokens < N)
        tl.store(id_ptr + tokens * B + tile, top_id, mask=tokens < N)


@triton.jit
def choice_kernel(
    best_ptr,
    id_ptr,
    token_ptr,
    chosen_ptr,
    chance_ptr,
    B,
    O,
    BB: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The likeliest token over all tiles, `chosen` `[N]`, the first of equal ones, and its
    probability, `chance` `[N]`. With LISTED, `token` are the outputs' tokens, ascending. BB is B
    rounded up to a power of two. Programs: N."""
    wait(PDL)
    n, tile = tl.program_id(0).to(tl.int64), tl.arange(0, BB)
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
