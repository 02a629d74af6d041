"""GGUF's blocks as native code multiplies them, sixteen rows side by side (`cpp/packed.h`).

Shapes: O rows of a matrix, B bytes of a row in a file.
"""

from collections.abc import Iterable, Sequence
from ctypes import CDLL, c_int64, c_void_p
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kangaroo.cpu.huge_pages import huge_pages
from kangaroo.engine.backend import LayerWeights, Matrix
from kangaroo.models.packed import PackedMatrix

PLAIN, IN_BYTES = 0, 1  # kinds that are not GGUF's, as in `products.h`


class Blocks:
    """A matrix in native code's order. Like a tensor it has a length, an address and a dtype: that
    of the states that it multiplies."""

    def __init__(self, matrix: PackedMatrix, memory: Tensor):
        self.kind, self.shape, self.dtype = int(matrix.kind), matrix.shape, matrix.dtype
        self.memory, self.nbytes = memory, memory.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def data_ptr(self) -> int:
        """The address of its memory."""
        return self.memory.data_ptr()


Weight = Tensor | Blocks
_known: WeakKeyDictionary[PackedMatrix, Weight] = WeakKeyDictionary()


def kind_of(weight: Weight | None) -> int:
    """The format for native code: numbers, bytes, or GGUF's number of a kind of blocks."""
    if isinstance(weight, Blocks):
        return weight.kind
    return IN_BYTES if weight is not None and weight.dtype == torch.int8 else PLAIN


def size_of(library: CDLL, kind: int, shape: torch.Size) -> int:
    """The bytes that a matrix takes in native code; 0 for a kind that it does not multiply."""
    call = library.packed_size
    call.argtypes, call.restype = [c_int64] * 3, c_int64
    return call(kind, *shape)


def native_weights(library: CDLL, matrices: Iterable[PackedMatrix]) -> list[Weight]:
    """The matrices as native code reads them, on huge pages in this order; each is made once. Those
    of a kind that it does not multiply, and those of plain numbers, are widened."""
    matrices = list(matrices)
    new = list({id(matrix): matrix for matrix in matrices if matrix not in _known}.values())
    packed = [size_of(library, int(matrix.kind), matrix.shape) for matrix in new]
    widened = [matrix.shape.numel() * matrix.dtype.itemsize for matrix in new]
    sizes = [size or wide for size, wide in zip(packed, widened, strict=True)]
    pack = library.pack
    pack.argtypes = [c_int64, c_void_p, *[c_int64] * 3, c_void_p, c_int64]
    for matrix, size, memory in zip(new, packed, huge_pages(sizes), strict=True):
        if not size:
            _known[matrix] = memory.view(matrix.dtype).view(matrix.shape).copy_(matrix.widened())
            continue
        blocks_OB, kind = matrix.blocks_OB, int(matrix.kind)
        assert blocks_OB.is_contiguous()
        row = blocks_OB.shape[1], *matrix.shape
        pack(kind, blocks_OB.data_ptr(), *row, memory.data_ptr(), torch.get_num_threads())
        _known[matrix] = Blocks(matrix, memory)
    return [_known[matrix] for matrix in matrices]


def native_layers(
    library: CDLL, layers: Sequence[LayerWeights[Matrix]]
) -> list[LayerWeights[Weight]]:
    """The layers with `native_weights` in place of packed matrices."""
    packed = [w for layer in layers for w in vars(layer).values() if isinstance(w, PackedMatrix)]
    found = dict(zip(packed, native_weights(library, packed), strict=True))
    return [
        LayerWeights(**{name: found.get(w, w) for name, w in vars(layer).items()})
        for layer in layers
    ]
