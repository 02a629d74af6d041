# mypy: disable-error-code="no-untyped-def"
"""Attention over the slots of a cache, with one kernel for prompts, chains, trees and batches.

The slots that a token sees are its positions 0, 1, ... in the order of its text. They are read in
blocks of 64 positions: a block is one product of queries with 64 keys. While positions are equal to
slots, blocks are shared, and a row of the product is a query head of any token in the row. From the
first block where they differ, each token reads its own blocks through an index of slots (its path),
and the rows are its query heads of a group. No row depends on the others, so both kinds of blocks
give the same bits.

A token's blocks are merged in order. Either one program goes through them, or each block is a
piece of its own, and another kernel merges the pieces: the sums are the same.

Shapes: N tokens, T of a row, E slots that may be seen, S slots of a row, P places of a path, B
pieces, H query heads, G key heads, D head size.
"""

import triton
import triton.language as tl

from kangaroo.cuda.kernels import read, rounded, tree_sum, wait, write


@triton.jit(do_not_specialize=["T", "E", "P", "ROW_STRIDE", "TOKEN_STRIDE"])
def path_kernel(
    bias_ptr, count_ptr, lead_ptr, path_ptr, T, E, P, ROW_STRIDE, TOKEN_STRIDE,
    BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Read a mask `bias`, contiguous for a token and 0 for slots that it sees: how many they are,
    how many of them are in shared blocks, and the others, `path` `[N, P]`. Programs: N."""
    wait(PDL)
    n = tl.program_id(0)
    bias_ptr += (n // T).to(tl.int64) * ROW_STRIDE + (n % T).to(tl.int64) * TOKEN_STRIDE
    path_ptr += n.to(tl.int64) * P
    lead = E // 64 * 64
    places = 0
    start = 0  # BE is a number of blocks: the first one of a path is known when it is read
    while start < E:  # the interpreter's ranges need constant ends
        slot = start + tl.arange(0, BE)
        is_seen = (slot < E) & (read(bias_ptr + slot, slot < E).to(tl.float32) == 0)
        lead = tl.minimum(lead, tl.min(tl.where(is_seen, E, slot)) // 64 * 64)
        on_path = (is_seen & (slot >= lead)).to(tl.int32)
        place = places + tl.cumsum(on_path, 0) - 1
        tl.store(path_ptr + place, slot, mask=(on_path > 0) & (place < P))
        places += tl.sum(on_path)
        start += BE
    tl.store(count_ptr + n, lead + places)
    tl.store(lead_ptr + n, lead)


@triton.jit
def merge(top, total, out, new_top, new_total, new_out):
    """Sums `out` `[M, D]` relative to the largest scores `top` `[M]`, with the `total` of their
    exponentials `[M]`, and those of one more piece. A piece of scores -inf changes nothing."""
    both = tl.maximum(top, new_top)
    shift = tl.where(both == float("-inf"), 0.0, both)
    old_scale = tl.exp(top - shift)
    new_scale = tl.exp(new_top - shift)
    out = out * old_scale[:, None] + new_out * new_scale[:, None]
    return both, total * old_scale + new_total * new_scale, out


@triton.jit
def first_block(count, WINDOW):
    """The first block that the last of `count` tokens sees."""
    return tl.where(WINDOW > 0, tl.maximum(count - 1 - WINDOW, 0) // 64, 0)


@triton.jit
def store_piece(sum_ptr, weight_ptr, piece, top, total, out, inside, D: tl.constexpr):
    """Write a piece of each row: `sum` `[N, H, B, D]` and `weight` `[N, H, B, 2]`."""
    d = tl.arange(0, out.shape[1])
    tl.store(sum_ptr + piece[:, None] * D + d[None, :], out, inside[:, None] & (d < D)[None, :])
    tl.store(weight_ptr + piece * 2, top, inside)
    tl.store(weight_ptr + piece * 2 + 1, total, inside)


@triton.jit(do_not_specialize=["T", "S", "P", "B", "TILES", "RUNS", "WINDOW"])
def attend_kernel(
    q_ptr, keys_ptr, values_ptr, S, row_ptr, count_ptr, lead_ptr, path_ptr, out_ptr, sum_ptr,
    weight_ptr, T, P, B, TILES, RUNS, WINDOW, scale, H: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, FOLDS: tl.constexpr,
    PATHS: tl.constexpr, ANY_ROW: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pieces of attention, or with FOLDS and without PATHS all of it, `out` `[N, H, D]`.

    Programs: units, key heads, rows. The first TILES * RUNS units are runs of shared blocks of ROWS
    query heads, the others T * P / 64 blocks of one token. A run has RUN blocks, and each is a
    piece, at its number; with FOLDS it has all blocks, and its sums are the first piece.

    Args:
        row_ptr: the cache's row of the first row, with ANY_ROW; otherwise it is 0.
        WINDOW: how many tokens a token looks back, rounded up to whole blocks; 0 is to all.
        DP: D rounded up to a power of two.
    """
    wait(PDL)
    GROUP: tl.constexpr = H // G
    FORMAT: tl.constexpr = q_ptr.dtype.element_ty
    unit, h, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, e, d = tl.arange(0, ROWS), tl.arange(0, 64), tl.arange(0, DP)
    t = ((TILES - 1 - unit // RUNS) * ROWS + m) // GROUP  # the longest ones begin first
    j = m % GROUP
    is_path = unit >= TILES * RUNS
    nth = 0
    path_token = row * T
    if PATHS:
        of_path = tl.where(is_path, unit - TILES * RUNS, 0)
        nth = of_path % (P // 64)
        path_token += of_path // (P // 64)
        t = tl.where(is_path, of_path // (P // 64), t)
        j = tl.where(is_path, m, j)
    is_row = (t < T) & (j < GROUP)
    token = row * T + tl.minimum(t, T - 1)
    count = tl.load(count_ptr + token)
    end = tl.load(lead_ptr + token)
    start = first_block(count, WINDOW) * 64
    last = (tl.max(tl.where(is_row, end, 0)) + 63) // 64
    if FOLDS:
        first = tl.min(tl.where(is_row, start // 64, last))
    else:
        first = unit % RUNS * RUN
        last = tl.minimum(last, first + RUN)
    if PATHS:
        first = tl.where(is_path, tl.load(lead_ptr + path_token) // 64 + nth, first)
        end = tl.where(is_path, count, end)
        path_last = tl.minimum(first + 1, (tl.load(count_ptr + path_token) + 63) // 64)
        last = tl.where(is_path, path_last, last)
    if (not FOLDS or PATHS) and first >= last:
        return
    stop = tl.where(is_row, tl.minimum(count, end), 0)
    seen = tl.max(stop)
    head = token.to(tl.int64) * H + h * GROUP + j
    q_offset = head[:, None] * D + d[None, :]
    in_head = (d < D)[None, :]
    q = read(q_ptr + q_offset, is_row[:, None] & in_head)
    first_row = row.to(tl.int64)
    if ANY_ROW:
        first_row += tl.load(row_ptr)
    if PATHS:  # which is one block
        pointers = path_ptr + path_token.to(tl.int64) * P + nth * 64 + e
        slot = tl.load(pointers, mask=first * 64 + e < tl.where(is_path, seen, 0), other=0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DP], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        place = block * 64 + e
        inside = (place < seen)[:, None] & in_head
        base = ((first_row * S + block * 64) * G + h) * D
        at = e
        if PATHS:
            at = tl.where(is_path, slot - block * 64, e).to(tl.int64)
        offset = (at * (G * D))[:, None] + d[None, :]
        keys = read(keys_ptr + base + offset, inside)
        values = read(values_ptr + base + offset, inside)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        is_visible = (start[:, None] <= place[None, :]) & (place[None, :] < stop[:, None])
        scores = tl.where(is_visible, scores, float("-inf"))
        new_top = tl.max(scores, 1)
        is_live = new_top > float("-inf")
        weights = tl.exp(scores - tl.where(is_live, new_top, 0.0)[:, None])
        new_out = tl.dot(rounded(weights, FORMAT), values, input_precision="ieee")
        new_total = tree_sum(weights)
        if FOLDS:
            top, total, out = merge(top, total, out, new_top, new_total, new_out)
        else:
            piece = head * B + block
            store_piece(sum_ptr, weight_ptr, piece, new_top, new_total, new_out, is_live, D)
    if FOLDS:
        if PATHS:
            piece = head * B + tl.where(is_path, 1 + nth, 0)
            store_piece(sum_ptr, weight_ptr, piece, top, total, out, is_row, D)
        else:
            out = tl.where(total[:, None] > 0, out / total[:, None], 0.0)
            write(out_ptr + q_offset, out, is_row[:, None] & in_head)


@triton.jit(do_not_specialize=["B", "WINDOW"])
def combine_kernel(
    sum_ptr, weight_ptr, count_ptr, lead_ptr, out_ptr, B, WINDOW, H: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, FOLDED: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge a token's pieces, in order, to `[N, H, D]`; 0 without any. AT_ONCE pieces are read at a
    time. With FOLDED the first one is of all shared blocks. Programs: N, H."""
    wait(PDL)
    n = tl.program_id(0)
    head = n.to(tl.int64) * H + tl.program_id(1)
    d = tl.arange(0, DP)[None, :]
    count = tl.load(count_ptr + n)
    first = first_block(count, WINDOW)
    piece, last = first, (count + 63) // 64
    if FOLDED:
        lead = tl.load(lead_ptr + n)
        piece, last = tl.where(first * 64 < lead, 0, 1), 1 + (count - lead + 63) // 64
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    out = tl.zeros([1, DP], tl.float32)
    while piece < last:
        for i in tl.static_range(AT_ONCE):
            at = head * B + piece + i + tl.arange(0, 1)
            inside = piece + i + tl.arange(0, 1) < last
            new_top = tl.load(weight_ptr + at * 2, inside, other=float("-inf"))
            new_total = tl.load(weight_ptr + at * 2 + 1, inside, other=0.0)
            new_out = tl.load(sum_ptr + at[:, None] * D + d, inside[:, None] & (d < D), other=0.0)
            top, total, out = merge(top, total, out, new_top, new_total, new_out)
        piece += AT_ONCE
    out = tl.where(total[:, None] > 0, out / total[:, None], 0.0)
    write(out_ptr + head * D + d, out, d < D)
