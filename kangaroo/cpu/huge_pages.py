"""Memory of huge pages, for weights in the order they are read, and for caches: at each page of
4 kB prefetching stops, which costs some processors a third of the memory's bandwidth.
"""

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

PAGE = 2**21
LINE = 64  # tensors begin at a multiple of a cache line


def move_to_huge_pages(parameters: Iterable[Tensor]) -> None:
    """Move parameters of one dtype into one piece of memory, one after another, so that no two are
    held twice; where the system has no huge pages to ask for, nothing."""
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
    for tensor, place in zip(tensors, places, strict=True):
        at = slice(start + place, start + place + tensor.numel() * tensor.element_size())
        tensor.data = whole[at].view(tensor.dtype).view(tensor.shape).copy_(tensor.data)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros, on huge pages where it is large and the system has them."""
    empty = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        begin = -(-empty.data_ptr() // PAGE) * PAGE
        end = (empty.data_ptr() + empty.nbytes) // PAGE * PAGE
        if begin < end:  # the system may refuse, and then nothing changes
            size, libc = ctypes.c_size_t(end - begin), ctypes.CDLL(None, use_errno=True)
            libc.madvise(ctypes.c_void_p(begin), size, mmap.MADV_HUGEPAGE)
    return empty.zero_()
