"""A CPU as a backend: layers and heads in native code."""

from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kangaroo.cpu.native import Fusing, Head, Stack
from kangaroo.engine.backend import Backend, LayerWeights, Sizes


@dataclass(eq=False)
class CpuBackend(Backend):
    """The native library, for layers of these sizes."""

    library: CDLL
    sizes: Sizes

    name = "native"
    is_compiled = runs_layers = True

    def layers(self, weights: Sequence[LayerWeights], window: int = 0) -> Stack:
        return Stack(self.library, weights, self.sizes, window)

    def head(self, weight_OD: Tensor, rounds: bool = False) -> Head:
        head = Head(self.library, weight_OD, self.sizes)
        if rounds and self.multiplies_bytes(weight_OD.dtype):
            head.round()
        return head

    def fusing(self, norms: Sequence[Tensor], weight: Tensor) -> Fusing:
        return Fusing(self.library, norms, weight, self.sizes)

    def machine(self, device: torch.device) -> list[str | int]:
        return [torch.get_num_threads(), Path(self.library._name).stem]

    def multiplies_bytes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and bool(self.library.multiplies_bytes())
