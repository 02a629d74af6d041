"""CUDA as a backend: graphs of a step's work, and layers and heads in Triton kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kangaroo.cuda import launching
from kangaroo.cuda.graphs import Graphs
from kangaroo.engine.backend import Backend, Fusing, Key, LayerWeights, Matrix, Sizes
from kangaroo.engine.cache import ForwardMeta, KVCache, power_of_two, tensors_in, with_tensors
from kangaroo.engine.tree import Draft

if TYPE_CHECKING:
    from kangaroo.cuda.layers import Head, Stack


@dataclass(eq=False)
class CudaBackend(Backend):
    """Graphs, kernels of layers of these sizes, or both."""

    graphs: Graphs | None = None
    kernel_sizes: Sizes | None = None

    is_compiled = True

    def __post_init__(self) -> None:
        self.records = self.graphs is not None
        self.runs_layers = self.kernel_sizes is not None
        self.attends_by_position = self.skips = self.runs_layers
        self.name = "kernels" if self.runs_layers else "graphs"

    def layers(self, weights: Sequence[LayerWeights[Matrix]], window: int = 0) -> "Stack | None":
        if self.kernel_sizes is None:
            return None
        from kangaroo.cuda.layers import Stack

        return Stack(cast(Sequence[LayerWeights], weights), self.kernel_sizes, window)

    def head(self, weight_OD: Matrix, rounds: bool = False) -> "Head | None":
        if self.kernel_sizes is None or not isinstance(weight_OD, Tensor):
            return None
        from kangaroo.cuda.layers import Head

        return Head(weight_OD, self.kernel_sizes)

    def fusing(self, norms: Sequence[Tensor], weight: Tensor | None) -> Fusing | None:
        if self.kernel_sizes is None or weight is None:
            return None
        from kangaroo.cuda.layers import fuse

        return partial(fuse, norms, weight, self.kernel_sizes.eps)

    def machine(self, device: torch.device) -> list[str | int]:
        code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
        triton = import_module("triton").__version__ if find_spec("triton") else "none"
        return [*super().machine(device), f"triton {triton}", sha256(code).hexdigest()]

    def records_prompts(self, tokens: int) -> bool:
        return self.runs_layers and self.graphs is not None and self.graphs.takes(tokens)

    def skip_unless(self, needed: Tensor | None) -> None:
        launching.skip_unless(None if needed is None else needed.any().int())

    def width(self, tokens: int, most: int) -> int:
        return tokens if self.graphs is None else max(tokens, min(power_of_two(tokens), most))

    def replay(
        self,
        caches: Sequence[KVCache],
        key: Key,
        work: Callable[..., Any] | None,
        *inputs: Any,
        tokens: int | None = None,
        keep: bool = False,
        rehearsal: tuple[Tensor, ...] | None = None,
    ) -> Any:
        """Recorded where all blocks among the inputs are `recordable` and tokens are few."""
        count = tokens or tensors_in(inputs[0])[0].shape[:2].numel()
        parts = (x.meta if isinstance(x, Draft) else x for x in inputs)
        blocks = [x for x in parts if isinstance(x, ForwardMeta)]
        recordable = all(block.recordable for block in blocks)
        if self.graphs is None or not recordable or not self.graphs.takes(count):
            return super().replay(caches, key, work, *inputs)
        key = (*key, *(block.extent for block in blocks))  # which not all of them have as a mask
        results = self.graphs(caches, key, work, *inputs, rehearsal=rehearsal)
        if not keep:
            return results
        return with_tensors(results, (x.clone() for x in tensors_in(results)))
