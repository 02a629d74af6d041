"""The backend for CPUs: layers and heads in native code."""

from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from kangaroo.cpu.blocks import PLAIN, Weight, kind_of, native_layers, native_weights
from kangaroo.cpu.native import Fusing, Head, Stack
from kangaroo.engine.backend import Backend, LayerWeights, Matrix, Sizes
from kangaroo.models.packed import PackedMatrix


@dataclass(eq=False)
class CpuBackend(Backend):
    """The native library, for layers of these sizes."""

    library: CDLL
    sizes: Sizes

    name = "native"
    is_compiled = runs_layers = reads_pairs = True

    def layers(self, weights: Sequence[LayerWeights[Matrix]], window: int = 0) -> Stack:
        return Stack(self.library, native_layers(self.library, weights), self.sizes, window)

    def head(self, weight_OD: Matrix, rounds: bool = False) -> Head:
        weight: Weight
        if isinstance(weight_OD, PackedMatrix):
            (weight,) = native_weights(self.library, [weight_OD])
        else:
            weight = weight_OD
        head = Head(self.library, weight, self.sizes)
        if rounds and kind_of(weight) == PLAIN and self.multiplies_bytes(weight.dtype):
            head.round()
        if rounds and isinstance(weight_OD, PackedMatrix) and kind_of(weight) == Kind.Q8_0:
            head.round(weight_OD)
        return head

    def fusing(self, norms: Sequence[Tensor], weight: Tensor | None) -> Fusing:
        return Fusing(self.library, norms, weight, self.sizes)

    def machine(self, device: torch.device) -> list[str | int]:
        return [torch.get_num_threads(), Path(self.library._name).stem]

    def multiplies_bytes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and bool(self.library.multiplies_bytes())
