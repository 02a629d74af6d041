"""What a drafter holds in memory beyond the target, by walking whatever it refers to."""

import gc
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from kangaroo.utils.memory import parts

LEAVES = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


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
