"""LayerSkip: a model that was trained to exit early drafts with its own final norm and head.

Shapes: B rows, N tokens of a block, D hidden size.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import Self

from kangaroo.drafters.base import ChainConfig, Drafter
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count


@dataclass
class LayerSkipConfig(ChainConfig):
    """LayerSkip's self-speculative decoding (arXiv 2404.16710, section 4.3): Kangaroo without an
    adapter, for models that were trained with losses at early exits; others draft nonsense.

    Args:
        exit_layer: how many layers draft (the paper's E); null is a quarter of them, as its 8 of
            Llama-2-7B's 32. (It never stops early, which is a `threshold` of 0.)
    """

    name: str = "layerskip"
    exit_layer: Count | None = None

    def build(self, lm: TargetModel) -> Drafter:
        """Errors: `ConfigError` for an exit layer that does not lie inside the target."""
        exit_layer = self.exit_layer or max(lm.n_layers // 4, 1)
        if exit_layer >= lm.n_layers:
            raise ConfigError(
                f"drafter.exit_layer={exit_layer} does not lie inside the target's {lm.n_layers} "
                f"layers; choose 1 to {lm.n_layers - 1}."
            )
        return Kangaroo(lm, FinalNorm(lm, exit_layer), self.steps, self.threshold)


class FinalNorm(Layer):
    """In an adapter's place the target's final norm: it has no keys, and nothing to train."""

    depth = 0

    def __init__(self, lm: TargetModel, exit_layer: int):
        super().__init__(lm, AdapterHeadConfig(), exit_layer, None, exit_layer)
        self.norm = lm.hf.model.norm

    def mix_inputs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor:
        assert self.norm is not None
        return f_BND.to(self.norm.get_parameter("weight").device)

    def accelerate(self, lm: TargetModel) -> Self:
        """Norm where the target's layers run, of which none is between."""
        self.native_layer = lm.fast_layers
        return self
