"""Attention over a KV cache for transformers' modules; here it is decided which kernel runs.

Shapes: R rows, T tokens, E occupied slots, H query heads, K key/value heads, C head size.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias

from kangaroo.models.draft_steps import DraftSteps

ATTENTION = "kangaroo"  # the name under which `attention` is registered with transformers
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(
    module: torch.nn.Module,
    q_RHTC: Tensor,
    k_RKEC: Tensor,
    v_RKEC: Tensor,
    bias_R1TE: Tensor | DraftSteps | None,
    scaling: float,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention that never expands grouped keys and values: a group's query
    heads become further query positions of its key head. `bias_R1TE` is that of `ForwardMeta`, or
    in training the draft steps up to this one; `softcap` bounds the scores before masking (Gemma 2,
    arXiv 2408.00118). Returns the output `[R, T, H, C]` and, as transformers expects, no weights.
    Errors: `ValueError` without a mask that is needed."""
    if isinstance(bias_R1TE, DraftSteps):
        steps = bias_R1TE
        layer: Any = module.layer_idx
        out_RHTC = None if softcap else steps.attend(layer, q_RHTC, scaling)
        if out_RHTC is not None:
            return out_RHTC.transpose(1, 2), None
        k_RKEC, v_RKEC, bias_R1TE = steps.joined(layer)
    rows, heads, width, size = q_RHTC.shape
    kv_heads, extent = k_RKEC.shape[1:3]
    group = heads // kv_heads
    attend = partial(fused_attention, scale=scaling)
    if bias_R1TE is None and extent != width:  # it would make transformers' generate wrong
        raise ValueError(
            f"{width} queries without a mask for {extent} keys: for transformers' own "
            "generate call set_attn_implementation('sdpa') first."
        )
    if softcap is not None:
        if bias_R1TE is None or isinstance(bias_R1TE, CausalBias):
            visible_TE = torch.ones(width, extent, dtype=torch.bool, device=q_RHTC.device)
            bias_R1TE = visible_TE.tril(extent - width)[None, None]
        attend = partial(capped_attention, scale=scaling, softcap=softcap)
    elif bias_R1TE is None or isinstance(bias_R1TE, CausalBias):
        causal = bias_R1TE is None and width > 1
        out = attend(q_RHTC, k_RKEC, v_RKEC, bias_R1TE, enable_gqa=group > 1, is_causal=causal)
        return out.transpose(1, 2), None
    bias = bias_R1TE if group == 1 else bias_R1TE.repeat(1, 1, group, 1)
    out = attend(q_RHTC.reshape(rows, kv_heads, group * width, size), k_RKEC, v_RKEC, bias)
    return out.reshape(rows, heads, width, size).transpose(1, 2), None


def fused_attention(
    q_RHTC: Tensor, k_RKEC: Tensor, v_RKEC: Tensor, bias: Tensor | None, **options: Any
) -> Tensor:
    """PyTorch's attention without cuDNN, which makes a plan for every new shape: in training a step
    with a mask of a new shape took half a second on an H100."""
    with sdpa_kernel(BACKENDS) if q_RHTC.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(q_RHTC, k_RKEC, v_RKEC, bias, **options)


def capped_attention(
    q_RKTC: Tensor, k_RKEC: Tensor, v_RKEC: Tensor, bias: Tensor, scale: float, softcap: float
) -> Tensor:
    """Attention with scores `softcap * tanh(score / softcap)`, for which torch has no kernel."""
    scores_RKTE = softcap * torch.tanh(q_RKTC @ k_RKEC.mT * (scale / softcap))
    is_mask = bias.dtype == torch.bool
    scores_RKTE = scores_RKTE.masked_fill(~bias, -torch.inf) if is_mask else scores_RKTE + bias
    return scores_RKTE.softmax(-1, dtype=torch.float32).to(v_RKEC.dtype) @ v_RKEC


def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a kernel by which the last tokens of a text attend without a mask."""
    return device.type == "cuda" and dtype.itemsize == 2
