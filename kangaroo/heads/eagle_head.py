"""EAGLE's head: one decoder layer that continues from the target's final states.

One linear map joins a token's embedding and the previous token's normed final state, the target's
or in a draft its own. The target's LM head reads the layer's output (EAGLE-1, arXiv 2401.15077,
section 3). As in the released code there is no norm at the beginning or the end.

Shapes: B rows, N tokens of a block, M positions, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from kangaroo.engine.cache import ForwardMeta
from kangaroo.heads import base
from kangaroo.heads.eagle_layer import as_released
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
        rope_base: base of the layer's rotation; null rotates like the target.
    """

    regression: NotNegative = 10.0
    sees_first: bool = True
    rope_base: Positive | None = None

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
        self.middle_norm = lm.new_norm()
        self.feed_forward = type(lm.layers[-1].mlp)(lm.config)

    def accelerate(self, lm: TargetModel) -> Self:
        parts = self.architecture
        return super().accelerate(lm) if parts.sees_first and parts.rope_base is None else self

    def placed(self, meta: ForwardMeta) -> ForwardMeta:
        parts = self.architecture
        if parts.sees_first and parts.rope_base is None:
            return meta
        return as_released(meta.for_layer(self.windowed), parts.sees_first, parts.rope_base)

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
