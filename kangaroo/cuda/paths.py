"""What each token of a pass sees: whole blocks of committed slots, then the path to it.

Shapes: R rows, T tokens a row, N tokens of all rows, D hidden size, P places of a path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from kangaroo.cuda import kernels_attention
from kangaroo.cuda.launching import cdiv, launch
from kangaroo.engine.cache import ForwardMeta

LONGEST_PATH = 128  # nodes of a draft from its root on


def flat(x_RTD: Tensor) -> Tensor:
    """All tokens in a line, `[N, D]`, without gaps: of a part of a block they have some."""
    return x_RTD.reshape(-1, x_RTD.shape[-1]).contiguous()


@dataclass
class Paths:
    """What the tokens of a pass see, for all layers.

    Args:
        count_N: slots that a token sees; 0 for what is no token.
        lead_N: how many of them are the slots 0, 1, ..., in whole blocks of 64.
        path_NP: the slots after those, in the order of positions; none of a prompt, whose last
            block is shared by the tokens that see a part of it.
        slots_N: where the tokens' own keys and values go.
        rope: cosine and sine, each `[N, head size]`.
    """

    count_N: Tensor
    lead_N: Tensor
    path_NP: Tensor
    slots_N: Tensor
    rope: tuple[Tensor, Tensor]


def paths(meta: ForwardMeta) -> Paths:
    """Read a block's mask: of the slots after the first one that is hidden from a token it may show
    `LONGEST_PATH`, or as many as the row has tokens. A part of a prompt has no mask of numbers."""
    rows, tokens = meta.slots_RT.shape
    slots_N = flat(meta.slots_RT[..., None])[:, 0]
    cos, sin = (flat(x.expand(rows, -1, -1)) for x in meta.rope)
    if meta.bias_R1TE is None or isinstance(meta.bias_R1TE, CausalBias):
        count_N = flat(meta.positions_RT[..., None])[:, 0].int() + 1
        return Paths(count_N, count_N, count_N.new_empty(len(count_N), 0), slots_N, (cos, sin))
    bias_RTE = meta.bias_R1TE[:, 0].expand(rows, -1, -1)
    places = cdiv(63 + max(tokens, LONGEST_PATH), 64) * 64
    integers = {"dtype": torch.int32, "device": slots_N.device}
    count_N, lead_N = torch.empty(2, len(slots_N), **integers)  # type: ignore[call-overload]
    path_NP = torch.empty(len(slots_N), places, **integers)  # type: ignore[call-overload]
    launch(
        kernels_attention.path_kernel,
        (len(slots_N),),
        *(bias_RTE, count_N, lead_N, path_NP, tokens, meta.extent, places),
        *bias_RTE.stride()[:2],
        BE=1024,
    )
    return Paths(count_N, lead_N, path_NP, slots_N, (cos, sin))
