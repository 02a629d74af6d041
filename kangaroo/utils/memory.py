"""The memory that a process holds and has held, and a drafter in it, on GPUs or a CPU; in bytes."""

import ctypes
import gc
import resource
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn

LEAVES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def peak(device: torch.device) -> int:
    """The most that this process has held so far: on the fullest GPU, else resident memory."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held


def total(device: torch.device) -> int:
    """All the memory that a GPU has; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def free(device: torch.device) -> int:
    """What a further tensor of this process may take on that device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def give_back() -> None:
    """Return what was freed to the system: of batches of all lengths glibc keeps ever more of it
    in pieces (a fused adapter's training held 5 GB, and 15 after 120 steps)."""
    with suppress(AttributeError):  # glibc's alone
        ctypes.CDLL(None).malloc_trim(0)


def weights(*modules: nn.Module) -> int:
    """The size of the modules' parameters, and of buffers, in which some quantized ones lie."""
    tensors = (x for module in modules for x in chain(module.parameters(), module.buffers()))
    return sum(part.nbytes for x in tensors for part in parts(x))


def parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that one of another type, such as torchao's, consists of; a plain one itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) in (Tensor, nn.Parameter) or flatten is None:
        return [tensor]
    return [getattr(tensor, name) for name in flatten()[0]]


class Footprint(NamedTuple):
    """What something holds in memory."""

    parameters: int  # elements of modules' weights
    bytes: int  # of all tensors and arrays as allocated, mapped files in full


def footprint(drafter: object, shared: Sequence[object]) -> Footprint:
    """What `drafter` holds that is not held by `shared` too, as the target and its batch are. Each
    piece of memory counts once, in full; Python's own objects, what a closure alone holds and what
    CUDA graphs keep do not."""
    seen: set[int] = set()
    theirs = {address for address, _, _ in _memory(shared, seen)}
    sizes: dict[tuple[str, int], tuple[int, int]] = {}
    for address, size, elements in _memory([drafter], seen):
        if address not in theirs:
            largest = sizes.get(address, (0, 0))
            sizes[address] = max(size, largest[0]), max(elements, largest[1])
    return Footprint(sum(x for _, x in sizes.values()), sum(x for x, _ in sizes.values()))


def _memory(roots: Sequence[object], seen: set[int]) -> Iterator[tuple[tuple[str, int], int, int]]:
    """Of all tensors and arrays not `seen`: address, bytes, and how many elements are a weight."""
    todo: list[Any] = list(roots)
    while todo:
        item = todo.pop()
        if isinstance(item, LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            weight = item.numel() if isinstance(item, nn.Parameter) else 0
            for part in parts(item):
                storage = part.untyped_storage()
                yield (str(item.device), storage.data_ptr()), storage.nbytes(), weight
                weight = 0  # of a quantized one, the scales are none
        elif isinstance(item, np.ndarray):
            while isinstance(item.base, np.ndarray):
                item = item.base
            yield ("cpu", item.ctypes.data), item.nbytes, 0
        else:
            todo.extend(gc.get_referents(item))
