"""Layers over whole texts on a CUDA device, as training runs a frozen target.

Products and attention are torch's. What lies between them, which in transformers' modules takes
some thirty kernels a layer that read and write all states, is five kernels here.

Shapes: R rows, T tokens of a row, N tokens of all rows, D hidden size, H heads, C head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.cpu.native import LayerWeights, Sizes
from kangaroo.cuda import kernels_texts
from kangaroo.cuda.launching import cdiv, launch
from kangaroo.cuda.layers import Stack, add_and_norm, flat, power_of_two
from kangaroo.engine.cache import ForwardMeta
from kangaroo.models.attention import attention

BLOCK = 1024  # numbers of a program


def takes(x_RTD: Tensor, meta: ForwardMeta) -> bool:
    """Whether these are whole texts, from which nothing is learnt here."""
    return meta.bias_R1TE is None and meta.extent == x_RTD.shape[1] and not x_RTD.requires_grad


@torch.no_grad()
def run(stack: Stack, x_RTD: Tensor, meta: ForwardMeta, layers: range) -> Tensor:
    """The output of the last layer, `[R, T, D]`; x stays as it is."""
    x_ND, eps, added_1ND = flat(x_RTD), stack.sizes.eps, None
    rows, tokens = x_RTD.shape[:2]
    for layer in (stack.layers[index] for index in layers):
        assert layer.o is not None and layer.down is not None
        x_ND, normed_ND = add_and_norm(x_ND, added_1ND, layer.attention_norm, eps)
        q, k, v = _heads(normed_ND.view(rows, tokens, -1), meta, layer, stack.sizes)
        attended, _ = attention(torch.nn.Identity(), q, k, v, None, stack.sizes.scaling)
        added_1ND = F.linear(attended.reshape(1, rows * tokens, -1), layer.o, layer.o_bias)
        x_ND, normed_ND = add_and_norm(x_ND, added_1ND, layer.feed_forward_norm, eps)
        added_1ND = F.linear(_gated(normed_ND, layer), layer.down)[None]
    return add_and_norm(x_ND, added_1ND, None, eps)[0].view(x_RTD.shape)


def _heads(x_RTD: Tensor, meta: ForwardMeta, layer: LayerWeights, sizes: Sizes) -> list[Tensor]:
    """Queries, keys and values, each `[R, H, T, C]`."""
    assert layer.q is not None and layer.k is not None and layer.v is not None
    parts = (
        (layer.q, layer.q_bias, layer.q_norm, sizes.heads, True),
        (layer.k, layer.k_bias, layer.k_norm, sizes.kv_heads, True),
        (layer.v, layer.v_bias, None, sizes.kv_heads, False),
    )
    projected = []
    for weight, bias, norm, heads, turns in parts:
        part_RTO = F.linear(x_RTD, weight, bias)
        if turns:
            _rotate(part_RTO, norm, meta, heads, sizes)
        projected.append(part_RTO.unflatten(-1, (heads, -1)).transpose(1, 2))
    return projected


def _rotate(
    x_RTO: Tensor, norm: Tensor | None, meta: ForwardMeta, heads: int, sizes: Sizes
) -> None:
    cos_RTC, sin_RTC = (x.contiguous() for x in meta.rope)
    rows, tokens, _ = x_RTO.shape
    launch(
        kernels_texts.rotate_kernel,
        (rows * tokens,),
        *(x_RTO, x_RTO if norm is None else norm, cos_RTC, sin_RTC, tokens),
        *(0 if len(cos_RTC) == 1 else cos_RTC.stride(0), sizes.eps),
        H=heads,
        HP=power_of_two(heads),
        D=sizes.head_size,
        HALF=power_of_two(sizes.head_size // 2),
        NORMS=norm is not None,
        num_warps=4,
    )


def _gated(x_ND: Tensor, layer: LayerWeights) -> Tensor:
    """What goes down again, `[N, O]`."""
    assert layer.gate is not None and layer.up is not None
    gate_NO, up_NO = F.linear(x_ND, layer.gate), F.linear(x_ND, layer.up)
    grid = (cdiv(gate_NO.numel(), BLOCK),)
    launch(kernels_texts.gate_kernel, grid, gate_NO, up_NO, gate_NO.numel(), BLOCK=BLOCK)
    return gate_NO
