"""Huge pages for weights, in the order in which they are read, and for caches. Prefetching stops at
the end of a page: with pages of 4 kB some processors lose a third of the memory's bandwidth."""

import math
import mmap
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

PAGE = 2**21
LINE = 64  # bytes of a cache line, at whose beginning each tensor starts


def move_to_huge_pages(parameters: Iterable[Tensor]) -> None:
    """Move parameters, each once and in this order, to huge pages if the system has any."""
    tensors = list({id(parameter): parameter for parameter in parameters}.values())
    if not tensors or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    targets = huge_pages([tensor.nbytes for tensor in tensors])
    for tensor, target in zip(tensors, targets, strict=True):
        tensor.data = target.view(tensor.dtype).view(tensor.shape).copy_(tensor.data)


def huge_pages(sizes: Sequence[int]) -> list[Tensor]:
    """Tensors of so many bytes, one after another, on huge pages if the system has any."""
    *offsets, total = accumulate((-(-size // LINE) * LINE for size in sizes), initial=0)
    # private, since most systems have no huge pages for shared memory; allocated when first written
    mapped = mmap.mmap(-1, total + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps `mapped` alive
    memory = memory[-memory.data_ptr() % PAGE :]
    return [memory[start : start + size] for start, size in zip(offsets, sizes, strict=True)]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. A large one on a CPU takes memory where it is written, on huge pages if
    the system has any."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    (memory,) = huge_pages([size])
    return memory.view(dtype).view(shape)
