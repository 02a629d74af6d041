"""Memory of the process, its devices, and single objects such as a drafter, in bytes."""

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
Allocation = tuple[tuple[str, int], int, int]  # (device, address), bytes, elements of parameters


def peak(device: torch.device) -> int:
    """The peak memory of this process: of its fullest GPU, or resident memory on a CPU."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else 1024 * resident


def total(device: torch.device) -> int:
    """The memory of a GPU; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def free(device: torch.device) -> int:
    """The memory that is available for further tensors of this process on a device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def give_back() -> None:
    """Return freed memory to the system. With batches of varying lengths, glibc keeps more and more
    of it in fragments (training a fused adapter grew from 5 GB to 15 in 120 steps)."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def weight_bytes(*modules: nn.Module) -> int:
    """The size of the modules' parameters and buffers; some quantized weights are buffers."""
    tensors = (x for module in modules for x in chain(module.parameters(), module.buffers()))
    return sum(part.nbytes for x in tensors for part in plain_tensors(x))


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside a tensor subclass such as torchao's; a plain tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) in (Tensor, nn.Parameter) or flatten is None:
        return [tensor]
    return [getattr(tensor, name) for name in flatten()[0]]


class Footprint(NamedTuple):
    """The memory of an object."""

    parameters: int  # elements of modules' parameters
    bytes: int  # allocated for all tensors and arrays, mapped files in full


def footprint(drafter: object, shared: Sequence[object]) -> Footprint:
    """The memory of `drafter` beyond `shared` objects such as the target. Each allocation counts
    once, in full. Python objects do not count, nor does what only closures or CUDA graphs hold."""
    visited: set[int] = set()
    shared_addresses = {address for address, _, _ in _allocations(shared, visited)}
    sizes: dict[tuple[str, int], tuple[int, int]] = {}
    for address, size, elements in _allocations([drafter], visited):
        if address not in shared_addresses:
            largest = sizes.get(address, (0, 0))
            sizes[address] = max(size, largest[0]), max(elements, largest[1])
    return Footprint(sum(x for _, x in sizes.values()), sum(x for x, _ in sizes.values()))


def _allocations(roots: Sequence[object], visited: set[int]) -> Iterator[Allocation]:
    """The allocations of all tensors and arrays that are not yet `visited`."""
    stack: list[Any] = list(roots)
    while stack:
        item = stack.pop()
        if isinstance(item, LEAVES) or id(item) in visited:
            continue
        visited.add(id(item))
        if isinstance(item, Tensor):
            parameters = item.numel() if isinstance(item, nn.Parameter) else 0
            for part in plain_tensors(item):
                storage = part.untyped_storage()
                yield (str(item.device), storage.data_ptr()), storage.nbytes(), parameters
                parameters = 0  # the scales of a quantized tensor are no parameters
        elif isinstance(item, np.ndarray):
            while isinstance(item.base, np.ndarray):
                item = item.base
            yield ("cpu", item.ctypes.data), item.nbytes, 0
        else:
            stack.extend(gc.get_referents(item))
