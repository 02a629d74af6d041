"""What makes decoding faster than PyTorch: native code, or Triton kernels and CUDA graphs.

Shapes: B rows, N tokens of a block, D hidden size.
"""

from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from kangaroo.cpu import native
from kangaroo.cpu.native import Sizes
from kangaroo.cuda.graphs import Graphs, Key, Tensors
from kangaroo.engine.cache import ForwardMeta, KVCache, power_of_two

Caches = Sequence[KVCache]
Work = Callable[..., Tensors]


@dataclass(eq=False)
class Acceleration:
    """Of one target and all that drafts for it: a native library, or graphs and the kernels of
    `kangaroo.cuda.layers`; by default none."""

    library: CDLL | None = None
    sizes: Sizes | None = None
    graphs: Graphs | None = None
    kernels: ModuleType | None = None

    def __bool__(self) -> bool:
        return bool(self.library or self.graphs or self.kernels)

    def width(self, tokens: int, most: int) -> int:
        """How many tokens of a row a pass takes that needs so many: where it is recorded a power of
        two, or the most that there may be."""
        return tokens if self.graphs is None else max(tokens, min(power_of_two(tokens), most))

    def part(self, name: str, weights: Any, **more: Any) -> Any:
        """A `Stack`, `Head` or `Fusing` that reads these weights where they lie; None where neither
        kernels nor native code are there."""
        if self.kernels is not None:
            return getattr(self.kernels, name)(weights, self.sizes, **more)
        if self.library is None:
            return None
        return getattr(native, name)(self.library, weights, self.sizes, **more)

    def replay(
        self, caches: Caches, key: Key, work: Work, *inputs: Tensor, tokens: int, **how: Any
    ) -> Tensors:
        """`work(*inputs)`, over so many tokens of all rows; other arguments as of `Graphs`."""
        if self.graphs is None or not self.graphs.take(tokens):
            return work(*inputs)
        return self.graphs(caches, key, work, *inputs, **how)

    def step(
        self,
        caches: Caches,
        key: Key,
        work: Work,
        x_BND: Tensor,
        meta: ForwardMeta,
        *more: Tensor,
        keep: bool = False,
    ) -> Tensors:
        """`work(x, block, *more)`: recorded once and replayed, where this is a step of decoding.
        With `keep` the results outlive the next call with this key."""
        if (graphs := self._recording(x_BND, meta)) is None:
            return work(x_BND, meta, *more)
        layout = meta.tensors()

        def flat(x_BND: Tensor, *tensors: Tensor) -> Tensors:
            new_meta = meta.with_tensors(*tensors[: len(layout)])
            return work(x_BND, new_meta, *tensors[len(layout) :])

        results = graphs(caches, key, flat, x_BND, *layout, *more)
        return tuple(result.clone() for result in results) if keep else results

    def pin_inputs(
        self, caches: Caches, key: Key, x_BND: Tensor, meta: ForwardMeta, *more: Tensor
    ) -> tuple[ForwardMeta, Tensors]:
        """The block and more that steps on `x` will read; where they are recorded, it lies in the
        same place call after call, so that none copies it."""
        if (graphs := self._recording(x_BND, meta)) is None:
            return meta, more
        layout = meta.tensors()
        held = graphs(caches, key, None, *layout, *more)
        return meta.with_tensors(*held[: len(layout)]), held[len(layout) :]

    def _recording(self, x_BND: Tensor, meta: ForwardMeta) -> Graphs | None:
        graphs = self.graphs if meta.recordable else None
        return graphs if graphs and graphs.take(x_BND.shape[0] * x_BND.shape[1]) else None
