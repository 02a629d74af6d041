"""What makes decoding faster than PyTorch: native code, or Triton kernels and CUDA graphs.

Shapes: B rows, N tokens of a block.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from kangaroo.cpu import native
from kangaroo.cpu.native import Sizes
from kangaroo.cuda.graphs import Graphs, Key
from kangaroo.engine.cache import ForwardMeta, KVCache, power_of_two, tensors_in, with_tensors


@dataclass(eq=False)
class Acceleration:
    """What a target and its drafters run on: a native library, or graphs and the kernels of
    `kangaroo.cuda.layers`; by default PyTorch alone."""

    library: CDLL | None = None
    sizes: Sizes | None = None
    graphs: Graphs | None = None
    kernels: ModuleType | None = None

    def __bool__(self) -> bool:
        return bool(self.library or self.graphs or self.kernels)

    def multiplies_bytes(self, dtype: torch.dtype) -> bool:
        """Whether drafts can read weights in eight bits beside states of this format."""
        library = self.library if dtype == torch.bfloat16 else None
        return library is not None and bool(library.multiplies_bytes())

    def width(self, tokens: int, most: int) -> int:
        """The width of a pass over `tokens`: if it is recorded, a power of two or `most`."""
        return tokens if self.graphs is None else max(tokens, min(power_of_two(tokens), most))

    def part(self, name: str, weights: Any, **options: Any) -> Any:
        """A `Stack`, `Head` or `Fusing` of these weights; None without kernels and native code."""
        if self.kernels is not None:
            return getattr(self.kernels, name)(weights, self.sizes, **options)
        if self.library is None:
            return None
        return getattr(native, name)(self.library, weights, self.sizes, **options)

    def replay(
        self,
        caches: Sequence[KVCache],
        key: Key,
        work: Callable[..., Any] | None,
        *inputs: Any,
        tokens: int | None = None,
        keep: bool = False,
        **options: Any,
    ) -> Any:
        """`work(*inputs)`, recorded once and replayed in steps of decoding: where all blocks among
        the inputs are `recordable` and `tokens` are few, by default those of the first input,
        `[B, N, ...]`. With `keep` the results outlive the next call with this key; the other
        arguments are those of `Graphs`."""
        graphs, count = self.graphs, tokens or tensors_in(inputs[0])[0].shape[:2].numel()
        recordable = all(x.recordable for x in inputs if isinstance(x, ForwardMeta))
        if graphs is None or not recordable or not graphs.takes(count):
            return inputs if work is None else work(*inputs)
        results = graphs(caches, key, work, *inputs, **options)
        return with_tensors(results, (x.clone() for x in tensors_in(results))) if keep else results
