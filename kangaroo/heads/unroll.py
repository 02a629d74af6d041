"""Run a drafting layer over texts as it runs when drafting, all positions and draft steps at once.

Shapes: B rows, R rows of a block (1 or B), T tokens, D hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.engine.cache import ForwardMeta, PastKeys


class Unrolled(PastKeys):
    """Keys and values of all draft steps so far, one step's T tokens after another's."""

    def __init__(self) -> None:
        self.keys: dict[int, list[Tensor]] = defaultdict(list)  # by layers
        self.values: dict[int, list[Tensor]] = defaultdict(list)

    def update(
        self, k_RKTC: Tensor, v_RKTC: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys.append(k_RKTC)
        values.append(v_RKTC)
        return torch.cat(keys, 2), torch.cat(values, 2)


def unroll(
    layer: Callable[..., Tensor],
    f_BTD: Tensor,
    deep_BTD: Tensor,
    meta: ForwardMeta,
    steps: int,
    read_BT: Tensor | None = None,
) -> list[Tensor]:
    """The layer's states `[B, T, D]` at draft steps 1 to `steps`.

    The state of step k at a position is what the layer has there when its draft began k - 1
    tokens earlier: with the target's deep states up to then and its own after. As in decoding, the
    keys of the tokens before the draft are those of step 1, and those within it of their own steps
    (training-time test, EAGLE-3, arXiv 2503.01840).

    Args:
        layer: a drafting layer; see `Layer.forward`.
        deep_BTD: the target's states at the layer's `deep_tap`, normed.
        read_BT: where heads read them; see `Trainable.states`.
    """
    if steps > 1:
        read_BT = None  # later steps read states where no head does
    seen_RTT, past = sees(meta) if steps > 1 else None, Unrolled()
    states: list[Tensor] = []
    for step in range(1, steps + 1):
        deep_BTD, at = before(deep_BTD, meta.positions_RT), meta
        if seen_RTT is not None and step > 1:
            at = replace(meta, bias_R1TE=bias(in_draft(seen_RTT, step), f_BTD))
        deep_BTD = layer(f_BTD, deep_BTD, at, past, read_BT)
        states.append(deep_BTD)
    return states


def sees(meta: ForwardMeta) -> Tensor:
    """`[R, T, T]`: which tokens of a text each may attend to."""
    if meta.bias_R1TE is not None:
        bias_RTT = meta.bias_R1TE[:, 0]
        return bias_RTT if bias_RTT.dtype == torch.bool else bias_RTT == 0
    width = meta.positions_RT.shape[1]
    return torch.ones(1, width, width, dtype=torch.bool, device=meta.positions_RT.device).tril()


def in_draft(seen_RTT: Tensor, step: int) -> Tensor:
    """`[R, T, step * T]`: what a token at draft step `step` attends to, among all steps' keys.

    Of step 1, what lies before the draft; of each later step, the draft's one token of that step.
    """
    past = [seen_RTT.tril(1 - step)]
    past += [seen_RTT.tril(back).triu(back) for back in range(2 - step, 1)]
    return torch.cat(past, -1)


def bias(seen_RTE: Tensor, like: Tensor) -> Tensor:
    """The additive mask `[R, 1, T, E]` of what is seen."""
    zeros = torch.zeros(seen_RTE.shape, dtype=like.dtype, device=like.device)
    return zeros.masked_fill_(~seen_RTE, -torch.inf)[:, None]


def before(x_BTD: Tensor, positions_RT: Tensor) -> Tensor:
    """What stood one token earlier; zeros at the start of a text."""
    shifted_BTD = F.pad(x_BTD[:, :-1], (0, 0, 1, 0))
    return shifted_BTD * (positions_RT > 0)[..., None]
