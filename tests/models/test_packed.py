"""Matrices in a GGUF file's blocks."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kangaroo.models.packed import PackedEmbedding, PackedLinear

WRITABLE = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


@pytest.mark.parametrize("kind", WRITABLE)
def test_a_packed_matrix_multiplies_what_gguf_widens(kind):
    numbers_OI = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    blocks_OB = gguf.quantize(numbers_OI, kind).view(np.uint8)
    expected_OI = torch.from_numpy(gguf.dequantize(blocks_OB, kind).copy()).bfloat16()
    bias, x_NI = torch.nn.Parameter(torch.randn(6).bfloat16()), torch.randn(3, 64).bfloat16()

    linear = PackedLinear(torch.from_numpy(blocks_OB), kind, torch.bfloat16, bias)
    assert (linear.in_features, linear.out_features) == (64, 6)
    assert torch.equal(linear(x_NI), torch.nn.functional.linear(x_NI, expected_OI, bias))
    assert not linear.state_dict().keys() - {"bias"}

    table = PackedEmbedding(torch.from_numpy(blocks_OB), kind, torch.bfloat16)
    tokens_BN = torch.tensor([[5, 0], [3, 3]])
    assert torch.equal(table(tokens_BN), expected_OI[tokens_BN])
