"""The memory that a process holds and has held, on its GPUs or on the CPU; all in bytes."""

import ctypes
import resource
import sys
from contextlib import suppress
from itertools import chain

import psutil
import torch
from torch import Tensor, nn


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
