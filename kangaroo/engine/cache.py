"""A KV cache addressed by slot. The mask tells what is valid; the cache keeps no length.

Shapes: B rows, S slots a row, T tokens of a block, E occupied slots (the extent, E <= S), H query
heads, K key/value heads, C head size, R rows of a block (a contiguous range of the B rows).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from kangaroo.cpu.huge_pages import zeros

Tensors = tuple[Tensor, ...]
BUCKET = 64  # attention reads the occupied slots rounded up to a multiple of this: few shapes occur
MIN_RECORDED = 256  # where CUDA graphs are recorded, the smallest extent; others are powers of two


def tensors_in(x: Any, tensors: list[Tensor] | None = None) -> list[Tensor]:
    """All tensors of a nested tuple, list or dataclass in order, appended to `tensors`."""
    tensors = [] if tensors is None else tensors
    if isinstance(x, (tuple, list)):
        for part in x:
            tensors_in(part, tensors)
    elif issubclass(x.__class__, Tensor):  # faster than `isinstance`, which most often fails
        tensors.append(x)
    else:
        for name in field_names(x.__class__):
            tensors_in(getattr(x, name), tensors)
    return tensors


def with_tensors(x: Any, tensors: Iterator[Tensor]) -> Any:
    """`x` with the next of `tensors` in place of each of its own, in the order of `tensors_in`."""
    if isinstance(x, Tensor):
        return next(tensors)
    if isinstance(x, (tuple, list)):
        parts = [with_tensors(part, tensors) for part in x]
        return x._make(parts) if hasattr(x, "_make") else tuple(parts)
    changed = {name: with_tensors(getattr(x, name), tensors) for name in field_names(x.__class__)}
    return replace(x, **changed) if changed else x


@cache
def field_names(kind: type) -> list[str]:
    """The fields of a dataclass; none of other types."""
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


@dataclass
class ForwardMeta:
    """Where a block of tokens lies: the slots it writes, its positions, and what it may see.

    Args:
        slots_RT: slot of each token within its row.
        positions_RT: for RoPE, whose cosine and sine are in `rope`, and for the sampling noise.
        bias_R1TE: what is added to the scores (0, or -inf for a slot that is not seen); or a
            boolean mask, true for a slot that is seen; or a `CausalBias`, for the last T tokens of
            a prompt. None lets each token see all positions up to its own; modules take it only
            for a block in slots 0 to T - 1 (other backends: `Backend.attends_by_position`).
        extent: how many slots attention reads.
        recordable: whether the block is a step of decoding, which may be recorded as a CUDA graph.
        windowed: mask, cosine and sine for layers with a sliding window, if the model has any.
        row_1: an offset to `rows` in a tensor, so that one recorded graph serves any row.
    """

    slots_RT: Tensor
    positions_RT: Tensor
    bias_R1TE: Tensor | None
    extent: int
    rows: slice
    rope: tuple[Tensor, Tensor]
    recordable: bool = False
    windowed: tuple[Any, ...] = ()
    row_1: Tensor | None = None

    def for_layer(self, windowed: bool) -> ForwardMeta:
        """The block as a layer with or without a window reads it."""
        if not windowed or not self.windowed:
            return self
        bias_R1TE, cos, sin = self.windowed
        return replace(self, bias_R1TE=bias_R1TE, rope=(cos, sin), windowed=())

    def within(self, window: int) -> ForwardMeta:
        """The block for a layer of modules that looks back `window` positions (0: all), rounded up
        to whole blocks of 64. Slots are positions, except for drafted tokens, which are near."""
        is_far = 0 < window < self.extent - BUCKET
        if not is_far and (self.bias_R1TE is not None or self.extent == self.slots_RT.shape[1]):
            return self
        at_RT1 = self.positions_RT[..., None]
        slots_E = torch.arange(self.extent, device=at_RT1.device)
        nearest = window if is_far else self.extent
        return self.hiding(slots_E < (at_RT1 - nearest) // BUCKET * BUCKET)

    def hiding(self, hidden_RTE: Tensor) -> ForwardMeta:
        """The block with these slots hidden from its tokens, too."""
        bias = self.bias_R1TE
        if bias is None or isinstance(bias, CausalBias):  # slots are positions
            slots_E = torch.arange(hidden_RTE.shape[-1], device=hidden_RTE.device)
            bias = (slots_E <= self.positions_RT[..., None])[:, None]
            if self.recordable:  # in decoding; kernels add a mask to scores
                bias = self.rope[0].new_zeros(bias.shape).masked_fill(~bias, -torch.inf)
        nothing = False if bias.dtype == torch.bool else -torch.inf
        return replace(self, bias_R1TE=bias.masked_fill(hidden_RTE[:, None], nothing))

    def narrow(self, start: int, width: int) -> ForwardMeta:
        """The block of the `width` tokens from `start` on, or of as many as there are, as views."""
        width = min(width, self.slots_RT.shape[1] - start)
        return self._each(lambda x, axis: x.narrow(axis, start, width))

    def take(self, index_RN: Tensor) -> ForwardMeta:
        """The tokens at `index_RN` in the block, in that order."""

        def take(x: Tensor, axis: int) -> Tensor:
            shape = [len(index_RN), *[1] * (x.ndim - 1)]
            shape[axis] = -1
            return x.take_along_dim(index_RN.view(shape), axis)

        return self._each(take)

    def to(self, device: torch.device) -> ForwardMeta:
        """The same block for layers on another device."""
        if self.slots_RT.device == device:
            return self
        # a `CausalBias` has no memory
        return self._each(lambda x, _: x if isinstance(x, CausalBias) else x.to(device))

    @staticmethod
    def join(metas: Sequence[ForwardMeta]) -> ForwardMeta:
        """Blocks of the same rows and extent as one block."""
        parts = zip(*map(tensors_in, metas), strict=True)
        return metas[0]._each(lambda _, axis: torch.cat(next(parts), axis))

    def _each(self, change: Callable[[Tensor, int], Tensor]) -> ForwardMeta:
        """The block with `change(tensor, axis of its tokens)` in place of each tensor."""
        # only masks have four axes, of which the second is for the heads; only `row_1` has one
        tensors = tensors_in(self)
        changed = (change(x, 2 if x.ndim == 4 else 1) if x.ndim > 1 else x for x in tensors)
        return with_tensors(self, changed)


Taps = dict[int, Tensor]  # hidden states of the target, by the number of layers below them
Chunk = tuple[Tensor, ForwardMeta, Taps]  # a prompt's chunk: the arguments of `Drafter.prefill`


class KVCache:
    """Keys and values of some layers, each `[B * S, K, C]` on its layer's device, so that one
    `index_copy_` writes any rows and slots, and attention reads rows as strided views."""

    serials = itertools.count()  # a cache's serial number is unique in this process

    def __init__(self, batch_size: int, n_slots: int, keys: list[Tensor], values: list[Tensor]):
        self.serial = next(self.serials)
        self.batch_size = batch_size
        self.n_slots = n_slots
        self.keys = keys
        self.values = values

    @staticmethod
    def empty(
        batch_size: int,
        n_slots: int,
        n_heads: int,
        head_size: int,
        dtype: torch.dtype,
        devices: list[torch.device],
    ) -> KVCache:
        """A cache of zeros for a layer on each of these devices."""
        shape = (batch_size * n_slots, n_heads, head_size)
        keys, values = ([zeros(shape, dtype, device) for device in devices] for _ in range(2))
        return KVCache(batch_size, n_slots, keys, values)

    def at(self, meta: ForwardMeta) -> BlockCache:
        """The cache that attention layers get while the block `meta` runs."""
        return BlockCache(self, meta)

    def move(self, src_BT: Tensor, dst_BT: Tensor) -> None:
        """Copy slots `src` to slots `dst` of the same row in every layer, for an accepted path."""
        base_B1 = torch.arange(self.batch_size, device=src_BT.device)[:, None] * self.n_slots
        src = (src_BT + base_B1).flatten()
        dst = (dst_BT + base_B1).flatten()
        for cached in (*self.keys, *self.values):
            moved = cached.index_select(0, src.to(cached.device))
            cached.index_copy_(0, dst.to(cached.device), moved)

    def copy(self, source: int, row: int, count: int) -> None:
        """Copy the first `count` slots of a row to another one, in every layer."""
        for cached in (*self.keys, *self.values):
            by_row = cached.unflatten(0, (self.batch_size, self.n_slots))
            by_row[row, :count] = by_row[source, :count]

    def bytes(self) -> int:
        """Size of the allocation in bytes."""
        return sum(cached.nbytes for cached in (*self.keys, *self.values))


class BlockCache:
    """A `KVCache` for one block, as a transformers attention layer takes it."""

    def __init__(self, cache: KVCache, meta: ForwardMeta):
        self.cache = cache
        self.meta = meta

    @cached_property
    def index(self) -> Tensor:
        """Where the block's tokens lie in the cache's flat first axis, `[R * T]`."""
        meta = self.meta
        rows = torch.arange(meta.rows.start, meta.rows.stop, device=meta.slots_RT.device)
        return (meta.slots_RT + rows[:, None] * self.cache.n_slots).flatten()

    def update(
        self, k_RKTC: Tensor, v_RKTC: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the block's keys and values; return the occupied slots, each `[R, K, E, C]`."""
        keys_RKEC = self._write(self.cache.keys[layer_idx], k_RKTC)
        return keys_RKEC, self._write(self.cache.values[layer_idx], v_RKTC)

    def _write(self, cached: Tensor, new_RKTC: Tensor) -> Tensor:
        cached.index_copy_(0, self.index, new_RKTC.transpose(1, 2).flatten(0, 1))
        by_row = cached.unflatten(0, (self.cache.batch_size, self.cache.n_slots))
        return by_row[self.meta.rows, : self.meta.extent].transpose(1, 2)


def occupied(n_slots: int, used: int, recorded: bool = False) -> int:
    """How many slots attention reads to cover `used`; fewer values occur if it is `recorded`."""
    if recorded:
        return min(max(MIN_RECORDED, power_of_two(used)), n_slots)
    return min(math.ceil(used / BUCKET) * BUCKET, n_slots)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
