"""A target cut at any half layer: its attention and its feed-forward parts count as layers.

Shapes: R rows, T tokens a row, D hidden size.
"""

from __future__ import annotations

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
    its feed-forward part. It runs on the target's cache, as fast as the target.
    """

    def __init__(self, lm: TargetModel):
        super().__init__(lm.hf)
        self.layers = nn.ModuleList(
            without(layer, name, part)
            for layer in lm.layers
            for name, part in (("mlp", NoFeedForward()), ("self_attn", NoAttention()))
        )
        self.layer_devices = [device for device in lm.layer_devices for _ in range(2)]
        self.windowed = [windowed for windowed in lm.windowed for _ in range(2)]
        self.acceleration = lm.acceleration
        if lm.native_layers or lm.cuda_layers:
            parts = [half for layer in lm.layers for half in halves(layer_weights(layer))]
            stack: Any = HalfStack(lm.acceleration.part("Stack", parts))
            self.native_layers = stack if lm.native_layers else None
            self.cuda_layers = stack if lm.cuda_layers else None


class NoAttention(nn.Module):
    """Stands where attention is left out, and adds nothing."""

    def forward(
        self, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class NoFeedForward(nn.Module):
    """The same in the place of a feed-forward part."""

    def forward(self, x_RTD: Tensor) -> Tensor:
        return torch.zeros_like(x_RTD)


def without(layer: nn.Module, name: str, part: nn.Module) -> nn.Module:
    """The layer with another part of that name; the others are shared, and it stays as it was."""
    half = copy(layer)
    half._modules = layer._modules | {name: part}
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
