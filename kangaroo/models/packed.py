"""Matrices as they lie in a GGUF file: blocks of whole numbers with scales, widened when used.

Shapes: O rows of a matrix (outputs, or tokens), B bytes of a row, I numbers of a row, R some rows.
"""

from itertools import chain

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor, nn
from torch.nn import functional as F


class PackedMatrix(nn.Module):
    """A matrix `[O, I]` in blocks.

    Args:
        blocks_OB: the bytes of each row; they may be a view of a mapped file.
        kind: the format of the blocks.
        dtype: the number format of widened matrices, and of states.
    """

    blocks_OB: Tensor

    def __init__(self, blocks_OB: Tensor, kind: GGMLQuantizationType, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("blocks_OB", blocks_OB, persistent=False)
        self.kind = kind
        self.dtype = dtype
        self.kept_OI: Tensor | None = None  # see `keep_widened`
        numbers, size = GGML_QUANT_SIZES[kind]  # of a block
        self.shape = torch.Size((len(blocks_OB), blocks_OB.shape[1] // size * numbers))

    def widened(self, rows_R: Tensor | None = None) -> Tensor:
        """The matrix, or these rows of it, `[R, I]`, in `dtype`."""
        if self.kept_OI is not None:
            return self.kept_OI if rows_R is None else self.kept_OI[rows_R]
        blocks_RB = self.blocks_OB if rows_R is None else self.blocks_OB[rows_R]
        if not len(blocks_RB):  # for some formats gguf's function fails then
            return torch.empty(0, self.shape[1], dtype=self.dtype, device=self.blocks_OB.device)
        numbers_RI = dequantize(blocks_RB.cpu().numpy(), self.kind)
        # a copy, since float32 numbers would be a view of the file
        return torch.from_numpy(np.array(numbers_RI)).to(self.blocks_OB.device, self.dtype)


def keep_widened(module: nn.Module) -> None:
    """Widen the packed matrices inside a module once, for code that reads them at every token."""
    for part in module.modules():
        if isinstance(part, PackedMatrix):
            part.kept_OI = part.widened()


def weight_rows(module: nn.Module, rows_R: Tensor | None = None) -> Tensor:
    """The weight of a linear layer or an embedding, or these rows of it; packed ones widened."""
    if isinstance(module, PackedMatrix):
        return module.widened(rows_R)
    weight = module.get_parameter("weight")
    return weight if rows_R is None else weight[rows_R.to(weight.device)]


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's weights."""
    return next(chain(module.parameters(), module.buffers())).device


class PackedLinear(PackedMatrix):
    """A linear layer whose weight is packed; its bias is not."""

    def __init__(
        self,
        blocks_OB: Tensor,
        kind: GGMLQuantizationType,
        dtype: torch.dtype,
        bias: nn.Parameter | None = None,
    ):
        super().__init__(blocks_OB, kind, dtype)
        self.out_features, self.in_features = self.shape
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.widened(), self.bias)


class PackedEmbedding(PackedMatrix):
    """An embedding whose rows are packed; only those that are looked up are widened."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.widened(tokens.flatten()).unflatten(0, tokens.shape)
