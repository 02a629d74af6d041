"""Attention over a cache; only this module decides which kernel runs.

Shapes: R rows, T tokens, E occupied slots, H query heads, K key/value heads, C head size.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias

ATTENTION = "kangaroo"  # the name under which transformers finds it


def attention(
    module: torch.nn.Module,
    q_RHTC: Tensor,
    k_RKEC: Tensor,
    v_RKEC: Tensor,
    bias_R1TE: Tensor | None,
    scaling: float,
    read_RT: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, registered with transformers as `ATTENTION`, that never expands
    grouped keys and values: a group's query heads become further query positions of its key head.

    Args:
        bias_R1TE: what is added to the scores, or a boolean mask, true where a token is seen, both
            with the window; or a `CausalBias` for the last tokens of a prompt, which needs no
            memory; None for a whole text.
        read_RT: the tokens whose output is read, in training: for others it may be zeros.
        softcap: what scores come near to at most, before the mask (Gemma 2, arXiv 2408.00118).

    Returns the output `[R, T, H, C]` and, as transformers expects, no weights.
    """
    rows, heads, width, size = q_RHTC.shape
    kv_heads, extent = k_RKEC.shape[1:3]
    group = heads // kv_heads
    attend = partial(F.scaled_dot_product_attention, scale=scaling)
    # of a whole text a GPU computes all, since with a mask it would compute all scores, too
    if read_RT is not None and (bias_R1TE is not None or q_RHTC.device.type != "cuda"):
        assert not isinstance(bias_R1TE, CausalBias)
        return where_read(q_RHTC, k_RKEC, v_RKEC, bias_R1TE, scaling, read_RT, softcap), None
    if bias_R1TE is None and extent != width:  # transformers' generate: silently wrong
        raise ValueError(
            f"{width} queries without a mask for {extent} keys: for transformers' own "
            "generate call set_attn_implementation('sdpa') first."
        )
    if softcap is not None:
        if bias_R1TE is None or isinstance(bias_R1TE, CausalBias):
            seen_TE = torch.ones(width, extent, dtype=torch.bool, device=q_RHTC.device)
            bias_R1TE = seen_TE.tril(extent - width)[None, None]
        attend = partial(capped_attention, scale=scaling, softcap=softcap)
    elif bias_R1TE is None or isinstance(bias_R1TE, CausalBias):
        causal = bias_R1TE is None and width > 1
        out = attend(q_RHTC, k_RKEC, v_RKEC, bias_R1TE, enable_gqa=group > 1, is_causal=causal)
        return out.transpose(1, 2), None
    packed = q_RHTC.reshape(rows, kv_heads, group * width, size)
    bias = bias_R1TE if group == 1 else bias_R1TE.repeat(1, 1, group, 1)
    out = attend(packed, k_RKEC, v_RKEC, bias)
    return out.reshape(rows, heads, width, size).transpose(1, 2), None


def capped_attention(
    q_RKTC: Tensor, k_RKEC: Tensor, v_RKEC: Tensor, bias: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention whose scores are `softcap * tanh(score / softcap)`; torch has no kernel."""
    scores_RKTE = softcap * torch.tanh(q_RKTC @ k_RKEC.mT * (scale / softcap))
    is_mask = bias.dtype == torch.bool
    scores_RKTE = scores_RKTE.masked_fill(~bias, -torch.inf) if is_mask else scores_RKTE + bias
    return scores_RKTE.softmax(-1, dtype=torch.float32).to(v_RKEC.dtype) @ v_RKEC


def where_read(
    q_RHTC: Tensor,
    k_RKEC: Tensor,
    v_RKEC: Tensor,
    bias_R1TE: Tensor | None,
    scaling: float,
    read_RT: Tensor,
    softcap: float | None = None,
) -> Tensor:
    """Attention of as many tokens of each row as the row with most of them is read at, N, some of
    them others. Elsewhere the output `[R, T, H, C]` is zero."""
    most = int(read_RT.sum(1).max())
    index_RN = read_RT.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    places_RHNC = index_RN[:, None, :, None].expand(-1, q_RHTC.shape[1], -1, q_RHTC.shape[3])
    rows, extent = len(q_RHTC), k_RKEC.shape[2]
    if bias_R1TE is None:
        bias_R1NE = (index_RN[..., None] >= torch.arange(extent, device=q_RHTC.device))[:, None]
    else:
        bias_RTE = bias_R1TE[:, 0].expand(rows, -1, -1)
        bias_R1NE = bias_RTE.gather(1, index_RN[..., None].expand(-1, -1, extent))[:, None]
    q_RHNC, keys = q_RHTC.gather(2, places_RHNC), (k_RKEC, v_RKEC)
    out_RNHC, _ = attention(torch.nn.Identity(), q_RHNC, *keys, bias_R1NE, scaling, softcap=softcap)
    out_RHTC = out_RNHC.new_zeros(q_RHTC.shape)  # autocast may have changed the dtype
    return out_RHTC.scatter(2, places_RHNC, out_RNHC.transpose(1, 2)).transpose(1, 2)


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel that needs no mask for the last tokens of a text."""
    return device.type == "cuda" and dtype.itemsize == 2
