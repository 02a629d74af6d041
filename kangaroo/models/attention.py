"""Attention over a cache; only this module decides which kernel runs.

Shapes: R rows of a block, T tokens, E occupied slots, H query heads, K key/value heads, G = H / K,
C head size, P parts of the keys.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias

ATTENTION = "kangaroo"  # the name under which transformers finds it
FEWEST_KEYS = 256  # in a part: reading fewer takes less time than launching two more kernels

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

log = logging.getLogger(__name__)


def attention(
    module: torch.nn.Module,
    q_RHTC: Tensor,
    k_RKEC: Tensor,
    v_RKEC: Tensor,
    bias_R1TE: Tensor | None,
    scaling: float,
    read_RT: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention that never expands grouped keys and values.

    The query heads of one group become further query positions of their shared key head, so the
    cache is read once and in place. Registered with transformers under `ATTENTION`.

    Args:
        bias_R1TE: what is added to the scores, or a boolean mask, true where a token is seen; or a
            `CausalBias` for the last tokens of a prompt, which needs no memory; None for a whole
            text.
        read_RT: the tokens whose output is read, in training: for others it may be zeros.

    Returns the output `[R, T, H, C]` and, as transformers expects, no weights.
    """
    rows, heads, width, size = q_RHTC.shape
    kv_heads, extent = k_RKEC.shape[1:3]
    group = heads // kv_heads
    attend = partial(F.scaled_dot_product_attention, scale=scaling)
    if read_RT is not None and (bias_R1TE is not None or not skips_unseen(q_RHTC.device)):
        assert not isinstance(bias_R1TE, CausalBias)
        return where_read(q_RHTC, k_RKEC, v_RKEC, bias_R1TE, scaling, read_RT), None
    if bias_R1TE is None or isinstance(bias_R1TE, CausalBias):
        if bias_R1TE is None and extent != width:  # transformers' generate: silently wrong
            raise ValueError(
                f"{width} queries without a mask for {extent} keys: for transformers' own "
                "generate call set_attn_implementation('sdpa') first."
            )
        causal = bias_R1TE is None and width > 1
        out = attend(q_RHTC, k_RKEC, v_RKEC, bias_R1TE, enable_gqa=group > 1, is_causal=causal)
        return out.transpose(1, 2), None
    packed = q_RHTC.reshape(rows, kv_heads, group * width, size)
    bias = bias_R1TE if group == 1 else bias_R1TE.repeat(1, 1, group, 1)
    parts = parts_of(q_RHTC.device, rows, kv_heads, extent) if bias.dtype != torch.bool else 1
    if parts > 1:
        out = in_parts(packed, k_RKEC, v_RKEC, bias, scaling, parts, by_efficient_kernel)
    else:
        out = attend(packed, k_RKEC, v_RKEC, bias)
    return out.reshape(rows, heads, width, size).transpose(1, 2), None


def where_read(
    q_RHTC: Tensor,
    k_RKEC: Tensor,
    v_RKEC: Tensor,
    bias_R1TE: Tensor | None,
    scaling: float,
    read_RT: Tensor,
) -> Tensor:
    """Attention of as many tokens of each row as the row with most of them is read at, N: in a row
    with fewer, of some others too. Elsewhere the output `[R, T, H, C]` is zero.
    """
    most = int(read_RT.sum(1).max())
    index_RN = read_RT.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    places_RHNC = index_RN[:, None, :, None].expand(-1, q_RHTC.shape[1], -1, q_RHTC.shape[3])
    rows, extent = len(q_RHTC), k_RKEC.shape[2]
    if bias_R1TE is None:
        bias_R1NE = (index_RN[..., None] >= torch.arange(extent, device=q_RHTC.device))[:, None]
    else:
        bias_RTE = bias_R1TE[:, 0].expand(rows, -1, -1)
        bias_R1NE = bias_RTE.gather(1, index_RN[..., None].expand(-1, -1, extent))[:, None]
    out_RNHC, _ = attention(
        torch.nn.Identity(), q_RHTC.gather(2, places_RHNC), k_RKEC, v_RKEC, bias_R1NE, scaling
    )
    out_RHTC = out_RNHC.new_zeros(q_RHTC.shape)  # autocast may have changed the dtype
    return out_RHTC.scatter(2, places_RHNC, out_RNHC.transpose(1, 2)).transpose(1, 2)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel that needs no mask for the last tokens of a text."""
    return device.type == "cuda" and dtype.itemsize == 2


def skips_unseen(device: torch.device) -> bool:
    """Whether a whole text takes less time than the tokens of it that are read: these need a mask,
    with which a GPU computes all scores, by a slower kernel, and how many they are is known to the
    host only after all that was launched before.
    """
    return device.type == "cuda"


def parts_of(device: torch.device, rows: int, kv_heads: int, extent: int) -> int:
    """Into how many parts to split the keys, so that one text alone keeps a whole GPU busy.

    With a mask, torch's kernels give each key head to one multiprocessor. 1 means no split.
    """
    if device.type != "cuda" or rows > 1 or not can_split(device):
        return 1
    units = torch.cuda.get_device_properties(device).multi_processor_count
    most = min(units // kv_heads, extent // FEWEST_KEYS)
    return max((parts for parts in range(2, most + 1) if extent % (8 * parts) == 0), default=1)


def in_parts(
    q_1KTC: Tensor,
    k_1KEC: Tensor,
    v_1KEC: Tensor,
    bias_11TE: Tensor,
    scaling: float,
    parts: int,
    kernel: Kernel,
) -> Tensor:
    """Attention over each part of the keys, all at once, weighted by the sums of their scores.

    Args:
        kernel: returns the output `[P, K, T, C]` and the logarithm of the sum of the exponentiated
            scores, `[P, K, T]`; both may be anything where a token sees nothing of a part.

    Source: Flash-Decoding (Dao et al. 2023).
    """
    k_PKEC, v_PKEC = (x.unflatten(2, (parts, -1))[0].transpose(0, 1) for x in (k_1KEC, v_1KEC))
    bias_P1TE = bias_11TE[0].unflatten(-1, (parts, -1)).movedim(2, 0)
    q_PKTC = q_1KTC.expand(parts, -1, -1, -1)
    out_PKTC, sums_PKT = kernel(q_PKTC, k_PKEC, v_PKEC, bias_P1TE, scaling)
    seen_PKT = (bias_P1TE > -torch.inf).any(-1).expand_as(sums_PKT)
    weight_PKT = sums_PKT.masked_fill(~seen_PKT, -torch.inf).softmax(0)
    out_PKTC = out_PKTC.masked_fill(~seen_PKT[..., None], 0)
    return (weight_PKT[..., None] * out_PKTC).sum(0, keepdim=True).to(q_1KTC.dtype)


def by_efficient_kernel(
    q_PKTC: Tensor, k_PKEC: Tensor, v_PKEC: Tensor, bias_P1TE: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """torch's memory-efficient attention, which also returns the sums; only on a GPU."""
    bias_PKTE = bias_P1TE.expand(-1, q_PKTC.shape[1], -1, -1)
    out_PKTC, sums_PKT, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_PKTC, k_PKEC, v_PKEC, bias_PKTE, compute_log_sumexp=True, scale=scaling
    )
    return out_PKTC, sums_PKT[..., : q_PKTC.shape[2]]  # the kernel pads the sums


@cache
def can_split(device: torch.device) -> bool:
    """Whether attention in parts is right on this device; tested once, with a warning if not."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, width, 64, generator=generator, device=device).half()
        for width in (3, 512, 512)
    )
    bias = torch.zeros(1, 1, 3, 512, device=device).half()
    bias[..., 100:] = -torch.inf  # the second part is seen by nobody
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.1)
    try:
        out = in_parts(q, k, v, bias, 0.1, 2, by_efficient_kernel)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-2)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        log.warning(f"attention cannot be split on {device}, so long texts decode slower: {reason}")
        return False
    return True
