"""What EAGLE's layers have in common where they follow the released code.

There a pair of an embedding and the state before it takes the place of that state, so no pair
holds a text's first token; and the layer's rotation has a base of its own.

Shapes: R rows of a block, T tokens, E occupied slots, C head size.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from kangaroo.engine.cache import ForwardMeta


def as_released(meta: ForwardMeta, sees_first: bool, rope_base: float | None) -> ForwardMeta:
    """The block with a rotation of this base, if it is not None; and, without `sees_first`, with a
    mask that hides a text's first token from all others."""
    if rope_base is not None:
        meta = replace(meta, rope=rotation(meta, rope_base))
    if sees_first:
        return meta
    at_RT1, bias = meta.positions_RT[..., None], meta.bias_R1TE
    if bias is None or isinstance(bias, CausalBias):  # slots are positions
        bias = (torch.arange(meta.extent, device=at_RT1.device) <= at_RT1)[:, None]
        if meta.recordable:  # in decoding; kernels add a mask to scores
            bias = torch.zeros_like(bias, dtype=meta.rope[0].dtype).masked_fill(~bias, -torch.inf)
    slots_E = torch.arange(bias.shape[-1], device=at_RT1.device)
    hidden_R1TE = ((slots_E == 0) & (at_RT1 > 0))[:, None]
    hidden = False if bias.dtype == torch.bool else -torch.inf
    return replace(meta, bias_R1TE=bias.masked_fill(hidden_R1TE, hidden))


def rotation(meta: ForwardMeta, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, as in `ForwardMeta.rope`, of RoPE with this base."""
    like = meta.rope[0]
    places_X = torch.arange(0, like.shape[-1], 2, device=like.device)
    angles_RTX = meta.positions_RT[..., None] * base ** (-places_X / like.shape[-1])
    angles_RTC = torch.cat([angles_RTX, angles_RTX], -1)
    return angles_RTC.cos().to(like), angles_RTC.sin().to(like)
