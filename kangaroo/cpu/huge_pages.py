"""Memory of huge pages, for weights in the order they are read, and for caches: at each page of
4 kB prefetching stops, which costs some processors a third of the memory's bandwidth.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

PAGE = 2**21
LINE = 64  # tensors begin at a multiple of a cache line


def move_to_huge_pages(parameters: Iterable[Tensor]) -> None:
    """Move parameters of one dtype into one piece of memory, one after another: never are both held
    for more than one of them. Pages of a mapped checkpoint are given back, where nothing was
    written to them. Nothing is moved where the system has no huge pages to ask for.
    """
    tensors = list({id(parameter): parameter for parameter in parameters}.values())
    if not tensors or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    places, end = [], 0
    for tensor in tensors:
        places.append(end)
        end += -(-tensor.numel() * tensor.element_size() // LINE) * LINE
    # private, since most systems give shared memory no huge pages; taken when first written
    memory = mmap.mmap(-1, end + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # holds on to the memory
    start = -whole.data_ptr() % PAGE
    mapped = _mapped_files()
    for tensor, place in zip(tensors, places, strict=True):
        at = slice(start + place, start + place + tensor.numel() * tensor.element_size())
        before = tensor.data
        tensor.data = whole[at].view(tensor.dtype).view(tensor.shape).copy_(before)
        _give_back(before, mapped)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros, on huge pages where it is large and the system has them."""
    empty = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = -(-empty.data_ptr() // PAGE) * PAGE
        end = (empty.data_ptr() + empty.nbytes) // PAGE * PAGE
        if begin < end:
            _advise(begin, end, mmap.MADV_HUGEPAGE)
    return empty.zero_()


def _advise(begin: int, end: int, advice: int) -> None:
    """To the system about memory between two addresses; it may refuse, and then nothing changes."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


def _mapped_files() -> list[range]:
    """The addresses where files are mapped and hold what the files do: no page was written to."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return []
    mapped, addresses = [], range(0)
    for line in lines:
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):  # a mapping's first line; its numbers follow
            begin, end = (int(address, 16) for address in first.split("-"))
            of_file = len(rest) == 5 and rest[3] != "0"
            addresses = range(begin, end) if of_file else range(0)
        elif first == "Anonymous:" and rest[0] == "0" and addresses:
            mapped.append(addresses)
    return mapped


def _give_back(tensor: Tensor, mapped: Iterable[range]) -> None:
    """The pages of a file that only this tensor lies on; the file still has what they hold."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and any(begin in file and end - 1 in file for file in mapped):
        _advise(begin, end, mmap.MADV_DONTNEED)
