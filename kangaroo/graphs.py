"""CUDA graphs: work on tensors of unchanging shape, recorded once and replayed.

A step of decoding launches hundreds of small kernels, which takes the host longer than they take
the GPU. Everything about recording is here; callers name the shape by a key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from kangaroo.cache import Block, KVCache

WARM_UPS = 2  # libraries allocate and choose kernels in their first calls, which no graph may hold
MOST_TOKENS = 512  # more are a prompt's, whose shapes hardly come again

Tensors = tuple[Tensor, ...]
Key = tuple[Hashable, ...]
Record = Callable[[Callable[[], Tensors]], tuple[Callable[[], Any], Tensors]]


class Graphs:
    """Recorded work, by key.

    Besides its arguments, work may read and write tensors that stay where they are, such as caches
    and weights. Work that is recorded may call these graphs again: that becomes part of it.

    Args:
        record: runs work and returns what repeats it, and its results, which a repetition renews.
    """

    def __init__(self, record: Record | None = None):
        self.record = record or Recorder()
        self.made: dict[Key, tuple[Tensors, Callable[[], Any], Tensors]] = {}
        self.recording = False

    def take(self, x_BND: Tensor, block: Block) -> bool:
        """Whether this is a step of decoding, and not a prefill or training."""
        return (
            not self.recording
            and block.bias_R1TE is not None
            and x_BND.shape[0] * x_BND.shape[1] <= MOST_TOKENS
            and not torch.is_grad_enabled()
        )

    def __call__(self, key: Key, work: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        """The results of `work(*inputs)`, which must do the same for every call of this key.

        Args:
            key: its first part is the id of the cache that the work reads and writes.
        """
        if self.recording:
            return work(*inputs)
        if key not in self.made:
            held = tuple(tensor.clone() for tensor in inputs)
            self.recording = True
            try:
                self.made[key] = held, *self.record(lambda: work(*held))
            finally:
                self.recording = False
        held, replay, results = self.made[key]
        for mine, given in zip(held, inputs, strict=True):
            mine.copy_(given)
        replay()
        return tuple(tensor.clone() for tensor in results)  # the next replay overwrites them

    def forget(self, cache: KVCache) -> None:
        """Drop what was recorded with a cache, and so the cache itself."""
        self.made = {key: made for key, made in self.made.items() if key[0] != id(cache)}


class Recorder:
    """Records CUDA graphs, all in one pool of memory: none runs while another does."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], Tensors]) -> tuple[Callable[[], Any], Tensors]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            results = work()
        return graph.replay, results
