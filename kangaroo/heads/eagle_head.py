"""EAGLE's head: one decoder layer that goes on from the target's final states.

It reads a token's embedding and the target's normed final state of the token before, or in a draft
its own, joined by one linear map, and gives a state that the target's own LM head reads (EAGLE-1,
arXiv 2401.15077, section 3). As in the released code it has no norm at its beginning or end.

Shapes: B rows, N tokens of a block, M positions, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kangaroo.heads import base
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import NotNegative


@dataclass
class EagleHeadConfig(base.HeadConfig):
    """How it is taught, besides the loss on tokens of weight 1: `regression` weighs the smooth L1
    distance to the target's final states, averaged over their numbers. The paper gives the loss on
    tokens a weight of 0.1 and this one 1."""

    regression: NotNegative = 10.0

    drafter: ClassVar[str] = "eagle"

    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "EagleHead":
        return EagleHead(lm, self)

    def fixed_exit(self, lm: TargetModel) -> int:
        return 0  # it reads embeddings


class EagleHead(Layer):
    """A layer like the target's last one, trained to foresee what comes out of that. Like the
    paper's it begins at random: begun as what leaves the state as it is, the loss on tokens was 7.9
    nats after 18 steps on SmolLM2, against 3.5."""

    architecture: EagleHeadConfig

    def __init__(self, lm: TargetModel, architecture: EagleHeadConfig | None = None):
        parts, deepest = architecture or EagleHeadConfig(), lm.n_layers
        super().__init__(lm, parts, 0, deepest, like=deepest - 1)
        last, size = lm.layers[-1], lm.config.hidden_size
        self.join = nn.Linear(2 * size, size)
        self.attention = type(last.self_attn)(lm.config, layer_idx=0)
        self.middle_norm = lm.new_norm()
        self.feed_forward = type(last.mlp)(lm.config)

    def mix_inputs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor:
        assert deep_BND is not None
        joined_BND: Tensor = self.join(torch.cat([f_BND, deep_BND], -1))
        return joined_BND

    def side_loss(self, states: Sequence[Tensor], valid: Tensor, deep_MD: Tensor) -> Tensor | None:
        weight = self.architecture.regression
        if not weight:
            return None
        losses = [
            F.smooth_l1_loss(state_MD.float(), deep_MD.float(), reduction="none").mean(-1) * of_M
            for state_MD, of_M in zip(states, valid, strict=True)
        ]
        return weight * torch.stack(losses).sum()
