"""What whole models show too little of: rounding, choices among equals, and what is no token."""

import pytest
import torch
import triton
import triton.language as tl
from check_models import DEVICE, DTYPES
from torch import Tensor

from kangaroo.cpu.native import LayerWeights, Sizes
from kangaroo.cuda import kernels, layers
from kangaroo.cuda.launching import launch
from kangaroo.engine.cache import ForwardMeta, KVCache

slow = pytest.mark.slow
FORMATS = [torch.bfloat16, *(pytest.param(x, marks=slow) for x in DTYPES[:2])]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@triton.jit
def double_kernel(x_ptr, wide_ptr, y_ptr, N: tl.constexpr, PDL: tl.constexpr):
    at = tl.arange(0, N)
    x = kernels.read(x_ptr + at, at < N).to(tl.float32)
    tl.store(wide_ptr + at, x)
    kernels.write(y_ptr + at, x * 2, at < N)


@triton.jit
def round_kernel(x_ptr, y_ptr, z_ptr, N: tl.constexpr, PDL: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    kernels.write(y_ptr + at, x, at < N)
    tl.store(z_ptr + at, kernels.rounded(x, y_ptr.dtype.element_ty).to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_read_and_rounded_as_torch_does(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(DEVICE)
    wide, doubled = torch.empty(2**16, device=DEVICE), torch.empty_like(every)
    launch(double_kernel, (1,), every, wide, doubled, N=2**16)
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(doubled, every * 2, rtol=0, atol=0, equal_nan=True)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**16,), generator=generator)
    bits[::2] = bits[::2] // 2**16 * 2**16 + 2**15  # halfway between two numbers of bfloat16
    bits[::4] += 1
    floats = bits.to(torch.int32).view(torch.float32).to(DEVICE)
    if dtype == torch.float16:
        floats = floats.clamp(-6e4, 6e4)  # numpy warns of what has no place
    narrow, kept = torch.empty_like(every), torch.empty_like(wide)
    launch(round_kernel, (1,), floats, narrow, kept, N=2**16)
    torch.testing.assert_close(narrow, floats.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(kept, floats.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_choice_is_the_likeliest_token_and_of_equals_the_lowest(dtype):
    x, weight = numbers(19, 40, dtype=dtype), numbers(75, 40, dtype=dtype)
    weight[[70, 40, 3]] = weight[50] * 4  # three equal rows, in several tiles
    head = layers.Head(weight, Sizes(40, 1, 1, 16, 160, 1e-5, 0.25))
    logits = head(x)
    torch.testing.assert_close(logits, (x.double() @ weight.double().T).float(), rtol=0, atol=1e-4)
    (ids,), (chances,) = head.choose(x[None])
    order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, order.indices[:, 0]) and 3 in ids
    exact = logits.double().softmax(-1).gather(1, ids[:, None])
    torch.testing.assert_close(chances.double()[:, None], exact, rtol=1e-5, atol=1e-7)
    listed = torch.arange(75, device=DEVICE) * 2 + 1  # a part of a vocabulary
    assert torch.equal(head.choose(x[None], ids_O=listed)[0][0], ids * 2 + 1)


def test_what_is_no_token_writes_nothing():
    layer, cache = LayerWeights(), KVCache(1, 8, 1, 16, torch.float32, [DEVICE])
    layer.q, layer.k, layer.v = numbers(32, 48), numbers(16, 48), numbers(16, 48)
    layer.o = torch.eye(32, device=DEVICE)
    layer.attention_norm = torch.ones(48, device=DEVICE)
    slots_RT = torch.arange(2, device=DEVICE)[None]
    bias = torch.full((1, 1, 2, 8), -torch.inf, device=DEVICE)
    bias[0, 0, 0, 0] = 0
    rope = torch.ones(1, 2, 16, device=DEVICE), torch.zeros(1, 2, 16, device=DEVICE)
    meta = ForwardMeta(slots_RT, slots_RT, bias, 8, slice(0, 1), rope, recordable=True)
    stack = layers.Stack([layer], Sizes(48, 2, 1, 16, 192, 1e-5, 0.25))
    stack(numbers(1, 2, 48), cache, meta, range(1), keys_alone=True)
    assert cache.keys[0][0].any() and not cache.keys[0][1:].any()
