"""EAGLE's head: one decoder layer that continues from the target's final states.

A linear map joins a token's embedding and the previous token's normed final state: the target's, or
within a draft the head's own. The target's LM head reads the layer's output (EAGLE-1, arXiv
2401.15077, section 3). As in the released code there is no norm at the beginning or the end.

Shapes: B or R rows, N or T tokens of a block, M positions, C head size, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from kangaroo.engine.cache import ForwardMeta
from kangaroo.heads import base
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import NotNegative, Positive


@dataclass
class EagleHeadConfig(base.HeadConfig):
    """How a head is trained, and how an imported one differs from those that are trained here.

    Args:
        regression: weight of the mean smooth L1 distance to the target's final states in training;
            the loss on tokens has weight 1. The paper has weights of 1 and 0.1.
        sees_first: whether tokens see the text's first one, before which there is no state.
        rope_base: base of the layer's RoPE; null is the target's.
        norm_eps: epsilon of the layer's norm; null is the target's.
    """

    regression: NotNegative = 10.0
    sees_first: bool = True
    rope_base: Positive | None = None
    norm_eps: Positive | None = None

    drafter: ClassVar[str] = "eagle"

    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "EagleHead":
        return EagleHead(lm, self)

    def fixed_exit(self, lm: TargetModel) -> int:
        return 0  # it reads embeddings


class EagleHead(Layer):
    """A layer like the target's last one, trained to predict its output. Like the paper's it starts
    at random: from the identity, SmolLM2's loss on tokens was 7.9 nats after 18 steps, not 3.5."""

    architecture: EagleHeadConfig
    mixes_natively = False

    def __init__(self, lm: TargetModel, architecture: EagleHeadConfig | None = None):
        parts, deepest = architecture or EagleHeadConfig(), lm.n_layers
        super().__init__(lm, parts, 0, deepest, like=deepest - 1)
        self.first_seen = 0 if parts.sees_first else 1
        size = lm.config.hidden_size
        self.join = nn.Linear(2 * size, size)
        self.attention = self.new_attention(lm)
        self.middle_norm = lm.new_norm(parts.norm_eps)
        self.feed_forward = type(lm.layers[-1].mlp)(lm.config)

    def accelerate(self, lm: TargetModel) -> Self:
        parts = self.architecture
        is_like_target = parts.rope_base is None and parts.norm_eps is None
        return super().accelerate(lm) if parts.sees_first and is_like_target else self

    def placed(self, meta: ForwardMeta) -> ForwardMeta:
        return as_released(meta, self.architecture.sees_first, self.architecture.rope_base)

    def mix_inputs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor:
        assert deep_BND is not None
        return self.join(torch.cat([f_BND, deep_BND], -1))

    def side_loss(self, states: Sequence[Tensor], valid: Tensor, deep_MD: Tensor) -> Tensor | None:
        weight = self.architecture.regression
        if not weight:
            return None
        losses = [
            F.smooth_l1_loss(state_MD.float(), deep_MD.float(), reduction="none").mean(-1) * valid_M
            for state_MD, valid_M in zip(states, valid, strict=True)
        ]
        return weight * torch.stack(losses).sum()


def as_released(meta: ForwardMeta, sees_first: bool, rope_base: float | None) -> ForwardMeta:
    """The block as the released layers of EAGLE-1 and EAGLE-3 read it: with RoPE of their own base,
    if one is given, and, without `sees_first`, with a text's first token hidden from all others.
    There a pair of an embedding and the state before it takes the place of that state, so no pair
    holds the first token."""
    if rope_base is not None:
        like = meta.rope[0]
        places_X = torch.arange(0, like.shape[-1], 2, device=like.device)
        angles_RTX = meta.positions_RT[..., None] * rope_base ** (-places_X / like.shape[-1])
        angles_RTC = torch.cat([angles_RTX, angles_RTX], -1)
        meta = replace(meta, rope=(angles_RTC.cos().to(like), angles_RTC.sin().to(like)))
    if sees_first:
        return meta
    at_RT1 = meta.positions_RT[..., None]
    slots_E = torch.arange(meta.extent, device=at_RT1.device)
    return meta.hiding((slots_E == 0) & (at_RT1 > 0))
