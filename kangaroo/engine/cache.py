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
BUCKET = 64  # attention reads the occupied slots rounded up to this, so few shapes occur
MIN_RECORDED = 256  # where each extent is recorded as a graph: this, or a larger power of two


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
        positions_RT: for RoPE, with the cosine and sine in `rope`, and for the sampling noise.
        bias_R1TE: added to attention's scores (0 or -inf); or a boolean mask, true where a token is
            seen; or a `CausalBias`, for the last T tokens of a prompt; None where a token sees all
            positions up to its own: with modules in a block that fills slots 0..T-1 of its rows
            (`Backend.attends_by_position`; `within`).
        extent: how many slots attention reads.
        recordable: whether the block is a step of decoding, which may be recorded as a graph.
        windowed: mask, cosine and sine for layers with a window, if the model has any.
        row_1: an offset to `rows`, where one recording serves any row.
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
        """The block for a layer of modules that looks back `window` positions; 0 is no limit. A
        token sees whole blocks of 64 positions, from the one that lies `window` before it. Slots
        below the drafted tokens, which are nearer, are positions."""
        is_far = 0 < window < self.extent - BUCKET
        bias = self.bias_R1TE
        if not is_far and (bias is not None or self.extent == self.slots_RT.shape[1]):
            return self
        at_RT1 = self.positions_RT[..., None]
        slots_E = torch.arange(self.extent, device=at_RT1.device)
        if bias is None or isinstance(bias, CausalBias):
            bias = (slots_E <= at_RT1)[:, None]
        if not is_far:
            return replace(self, bias_R1TE=bias)
        far_R1TE = (slots_E < (at_RT1 - window) // BUCKET * BUCKET)[:, None]
        hidden = False if bias.dtype == torch.bool else -torch.inf
        return replace(self, bias_R1TE=bias.masked_fill(far_R1TE, hidden))

    def narrow(self, start: int, width: int) -> ForwardMeta:
        """Views of the `width` tokens from `start` on, or of as many as there are."""
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

    serials = itertools.count()  # a cache's own is unique in this process

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
        """The places of the block's tokens in the cache's flat first axis."""
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
    """How many slots attention reads to cover `used`: few values, even fewer if `recorded`."""
    if recorded:
        return min(max(MIN_RECORDED, power_of_two(used)), n_slots)
    return min(math.ceil(used / BUCKET) * BUCKET, n_slots)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
