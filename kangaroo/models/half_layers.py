"""A target cut at any half layer: its attention and its feed-forward parts count as layers.

Shapes: R rows, T tokens a row, D hidden size.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from kangaroo.cpu.native import LayerWeights
from kangaroo.engine.cache import ForwardMeta, KVCache
from kangaroo.models.layer_weights import layer_weights
from kangaroo.models.target import TargetModel


class HalfLayers(TargetModel):
    """The same model with the same weights, of twice as many layers: of each its attention, then
    its feed-forward part. It runs on the target's cache, as fast as the target."""

    def __init__(self, lm: TargetModel):
        super().__init__(lm.hf)
        names = "mlp", "self_attn"  # what is left out of a half
        self.layers = nn.ModuleList(without(layer, name) for layer in lm.layers for name in names)
        self.layer_devices = [device for device in lm.layer_devices for _ in range(2)]
        self.windowed = [windowed for windowed in lm.windowed for _ in range(2)]
        self.acceleration = lm.acceleration
        if lm.fast_layers:
            parts = [half for layer in lm.layers for half in halves(layer_weights(layer))]
            self.fast_layers = HalfStack(lm.acceleration.part("Stack", parts))


class Nothing(nn.Module):
    """Stands where a part is left out, and adds nothing."""

    def __init__(self, name: str):
        super().__init__()
        self.is_attention = name == "self_attn"

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.is_attention else zeros


def without(layer: nn.Module, name: str) -> nn.Module:
    """The layer without that part; the others are shared, and it stays as it was."""
    half = copy(layer)
    half._modules = layer._modules | {name: Nothing(name)}
    return half


def halves(layer: LayerWeights) -> tuple[LayerWeights, LayerWeights]:
    """The weights of its attention, and those of its feed-forward part."""
    weights = vars(layer)
    fed = {name: weights[name] for name in ("feed_forward_norm", "gate", "up", "down")}
    return LayerWeights(**weights | dict.fromkeys(fed)), LayerWeights(**fed)


class HalfStack:
    """A stack of half layers on a cache of whole ones."""

    def __init__(self, stack: Any):
        self.stack, self.takes = stack, stack.takes

    def __call__(self, x_RTD: Tensor, cache: KVCache, meta: ForwardMeta, layers: range) -> Tensor:
        return self.stack(x_RTD, Doubled(cache), meta, layers)


class Doubled(KVCache):
    """The same memory, where each layer's keys and values have two numbers."""

    def __init__(self, cache: KVCache):
        self.n_slots = cache.n_slots
        self.keys = [keys for keys in cache.keys for _ in range(2)]
        self.values = [values for values in cache.values for _ in range(2)]
