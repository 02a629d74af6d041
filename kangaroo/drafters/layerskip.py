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
    adapter, for models that were trained with losses at early exits (others draft nonsense). In the
    paper drafts never stop early, as with `threshold=0`.

    Args:
        exit_layer: how many layers draft (the paper's E); null is a quarter, 8 for Llama-2-7B.
        int8: draft with weights rounded to eight bits, where native code decodes in bfloat16.
    """

    name: str = "layerskip"
    exit_layer: Count | None = None
    int8: bool = True

    def build(self, lm: TargetModel) -> Drafter:
        """Errors: `ConfigError` for an exit layer outside the target."""
        exit_layer = self.exit_layer or max(lm.n_layers // 4, 1)
        if exit_layer >= lm.n_layers:
            raise ConfigError(
                f"drafter.exit_layer={exit_layer} does not lie inside the target's {lm.n_layers} "
                f"layers; choose 1 to {lm.n_layers - 1}."
            )
        return Kangaroo(lm, FinalNorm(lm, exit_layer, self.int8), self)


class FinalNorm(Layer):
    """The target's final norm in place of an adapter, without keys and without training."""

    depth = 0

    def __init__(self, lm: TargetModel, exit_layer: int, int8: bool):
        super().__init__(lm, AdapterHeadConfig(), exit_layer, deep_tap=None, like=exit_layer)
        self.norm = lm.hf.model.norm
        self.int8 = int8

    def mix_inputs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor:
        assert self.norm is not None
        return f_BND.to(self.norm.get_parameter("weight").device)

    def accelerate(self, lm: TargetModel) -> Self:
        """Let the target's layers norm: none of them runs."""
        self.fast_layers = lm.fast_layers
        return self
