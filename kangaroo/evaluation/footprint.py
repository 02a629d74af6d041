"""What a drafter holds in memory beyond the target: found by walking whatever it refers to."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kangaroo.utils.memory import parts

PLAIN = (str, bytes, int, float, type(None), type, torch.dtype, torch.device)
CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


class Footprint(NamedTuple):
    """What something holds in memory."""

    parameters: int  # elements of modules' weights
    bytes: int  # of all tensors and arrays as allocated, mapped files in full


def footprint(drafter: object, shared: Sequence[object]) -> Footprint:
    """What `drafter` holds that is not held by `shared` too, as the target and its batch are.

    Each piece of memory counts once, in full, however many views there are. Python's own objects,
    what a closure alone holds and what CUDA graphs keep are not counted.
    """
    seen: set[int] = set()
    theirs = {address for address, _, _ in _memory(shared, seen)}
    sizes: dict[tuple[str, int], tuple[int, int]] = {}
    for address, size, elements in _memory([drafter], seen):
        if address not in theirs:
            largest = sizes.get(address, (0, 0))
            sizes[address] = max(size, largest[0]), max(elements, largest[1])
    return Footprint(sum(x for _, x in sizes.values()), sum(x for x, _ in sizes.values()))


def _memory(roots: Sequence[object], seen: set[int]) -> Iterator[tuple[tuple[str, int], int, int]]:
    """Each tensor's or array's memory below `roots`: where it begins, its bytes, and how many
    elements of it are a weight. Objects whose ids are in `seen` are passed over, others are added.
    """
    todo: list[Any] = list(roots)
    while todo:
        item = todo.pop()
        if isinstance(item, PLAIN + CODE) or id(item) in seen:
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
        elif isinstance(item, list | tuple | set | frozenset | deque):
            todo.extend(item)
        else:
            fields = item if isinstance(item, dict) else getattr(item, "__dict__", {})
            todo.extend(fields.values())
