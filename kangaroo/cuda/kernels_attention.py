# mypy: disable-error-code="no-untyped-def"
"""Attention over the slots of a cache, with one kernel for chains, trees and batches.

The slots that a token sees are its positions 0, 1, ... in the order of its text. They are read in
blocks of 64 positions, and a block is one product of 16 columns with 64 keys. While positions are
equal to slots, blocks are shared, and a column is a query head of any token in the row. From the
first block where they differ, each token reads its own blocks through an index of slots (its path),
and the columns are its query heads of a group. No column depends on the others, so both kinds of
blocks give the same bits.

Shapes: N tokens, T of a row, E slots that may be seen, S slots of a row, P places of a path, B
blocks, H query heads, G key heads, D head size.
"""

import triton
import triton.language as tl

from kangaroo.cuda.kernels import read, rounded, wait, write


@triton.jit(do_not_specialize=["T", "E", "P", "ROW_STRIDE", "TOKEN_STRIDE"])
def path_kernel(
    bias_ptr,
    count_ptr,
    lead_ptr,
    path_ptr,
    T,
    E,
    P,
    ROW_STRIDE,
    TOKEN_STRIDE,
    BE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read a mask `bias`, contiguous for a token and 0 for slots that it sees: how many they are,
    how many of them are in shared blocks, and the others, `path` `[N, P]`. Programs: N."""
    wait(PDL)
    n = tl.program_id(0)
    bias_ptr += (n // T).to(tl.int64) * ROW_STRIDE + (n % T).to(tl.int64) * TOKEN_STRIDE
    path_ptr += n.to(tl.int64) * P
    e = tl.arange(0, BE)
    lead = E
    start = 0
    while start < E:  # the interpreter's ranges need constant ends
        slot = start + e
        is_seen = (slot < E) & (read(bias_ptr + slot, slot < E).to(tl.float32) == 0)
        lead = tl.minimum(lead, tl.min(tl.where(is_seen, E, slot)))
        start += BE
    lead = lead // 64 * 64
    count = lead
    start = lead
    while start < E:
        slot = start + e
        is_seen = (slot < E) & (read(bias_ptr + slot, slot < E).to(tl.float32) == 0)
        place = count - lead + tl.cumsum(is_seen.to(tl.int32), 0) - 1
        tl.store(path_ptr + place, slot, mask=is_seen & (place < P))
        count += tl.sum(is_seen.to(tl.int32))
        start += BE
    tl.store(count_ptr + n, count)
    tl.store(lead_ptr + n, lead)


@triton.jit(do_not_specialize=["T", "S", "P", "B", "COLUMNS", "WINDOW"])
def attend_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    S,
    row_ptr,
    count_ptr,
    lead_ptr,
    path_ptr,
    sum_ptr,
    weight_ptr,
    T,
    P,
    B,
    COLUMNS,
    WINDOW,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ANY_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """For a block and each column, the weighted sum of values, `sum` `[N, H, B, D]`; and the
    largest score with the sum of exponentials relative to it, `weight` `[N, H, B, 2]`.

    Programs: rows, key heads, units. The first COLUMNS * B units are shared blocks of 16 columns,
    the others T * P / 64 blocks of one token. Blocks before every column's window do nothing.

    Args:
        row_ptr: the cache's row of the first row, with ANY_ROW; otherwise it is 0.
        WINDOW: how many tokens a token looks back, rounded up to whole blocks; 0 is to all.
        DP: D rounded up to a power of two.
    """
    wait(PDL)
    GROUP: tl.constexpr = H // G
    FORMAT: tl.constexpr = q_ptr.dtype.element_ty
    row, h, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, e, d = tl.arange(0, 16), tl.arange(0, 64), tl.arange(0, DP)
    is_path = unit >= COLUMNS * B
    unit = tl.where(is_path, unit - COLUMNS * B, unit)
    per_part = tl.where(is_path, P // 64, B)
    part, nth = unit // per_part, unit % per_part
    t = tl.where(is_path, part, (part * 16 + m) // GROUP)
    j = tl.where(is_path, m, (part * 16 + m) % GROUP)
    token = row * T + tl.minimum(t, T - 1)
    path_token = row * T + tl.minimum(part, T - 1)  # a path is that of one token
    block = tl.where(is_path, tl.load(lead_ptr + path_token) // 64 + nth, nth)
    count = tl.load(count_ptr + token)
    end = tl.where(is_path, count, tl.load(lead_ptr + token))
    is_live = (t < T) & (j < GROUP) & (block * 64 < end) & (block >= first_block(count, WINDOW))
    if tl.max(is_live.to(tl.int32)) > 0:
        place = block * 64 + e
        path_end = tl.load(count_ptr + path_token)
        on_path = place < tl.where(is_path, path_end, 0)
        slot = tl.load(path_ptr + path_token.to(tl.int64) * P + nth * 64 + e, mask=on_path, other=0)
        slot = tl.where(is_path, slot, place)
        is_key = place < tl.max(tl.where(is_live, count, 0))
        head = token.to(tl.int64) * H + h * GROUP + j
        inside = is_live[:, None] & (d < D)[None, :]
        q = read(q_ptr + head[:, None] * D + d[None, :], inside)
        first = row.to(tl.int64)
        if ANY_ROW:
            first += tl.load(row_ptr)
        offset = ((first * S + slot) * G + h)[:, None] * D + d[None, :]
        key_inside = is_key[:, None] & (d < D)[None, :]
        keys = read(keys_ptr + offset, key_inside)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        is_visible = is_live[:, None] & (place[None, :] < count[:, None])
        scores = tl.where(is_visible, scores, float("-inf"))
        top = tl.max(scores, 1)
        weights = tl.exp(scores - tl.where(is_live, top, 0.0)[:, None])
        values = read(values_ptr + offset, key_inside)
        sums = tl.dot(rounded(weights, FORMAT), values, input_precision="ieee")
        head_block = head * B + block
        tl.store(sum_ptr + head_block[:, None] * D + d[None, :], sums, mask=inside)
        tl.store(weight_ptr + head_block * 2, top, mask=is_live)
        tl.store(weight_ptr + head_block * 2 + 1, tl.sum(weights, 1), mask=is_live)


@triton.jit
def first_block(count, WINDOW):
    """The first block that the last of `count` tokens sees."""
    return tl.where(WINDOW > 0, tl.maximum(count - 1 - WINDOW, 0) // 64, 0)


@triton.jit(do_not_specialize=["B", "WINDOW"])
def combine_kernel(
    sum_ptr,
    weight_ptr,
    count_ptr,
    out_ptr,
    B,
    WINDOW,
    H: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine a token's blocks, in order, to `[N, H, D]`; 0 without blocks. Programs: N, H."""
    wait(PDL)
    n = tl.program_id(0)
    head = n.to(tl.int64) * H + tl.program_id(1)
    d = tl.arange(0, DP)
    top, total, out = float("-inf"), 0.0, tl.zeros([DP], tl.float32)
    count = tl.load(count_ptr + n)
    block = first_block(count, WINDOW)
    while block * 64 < count:
        offset = head * B + block
        block_top = tl.load(weight_ptr + offset * 2)
        block_total = tl.load(weight_ptr + offset * 2 + 1)
        block_out = tl.load(sum_ptr + offset * D + d, mask=d < D, other=0.0)
        new = tl.maximum(top, block_top)
        old_scale, new_scale = tl.exp(top - new), tl.exp(block_top - new)
        out = out * old_scale + block_out * new_scale
        total = total * old_scale + block_total * new_scale
        top = new
        block += 1
    out = tl.where(total > 0, out / total, 0.0)
    write(out_ptr + head * D + d, out, d < D)
