"""Each kernel computes its formula: against float64.

Shapes: N tokens, K inputs, O outputs, P parts, V vocabulary; a B, T or R is as in the package.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from kernel_cases import DEVICE, DTYPES, assert_close, exact_attention, exact_norm, numbers

from kangaroo.cpu.native import LayerWeights, Sizes
from kangaroo.cuda import kernels, layers
from kangaroo.cuda.launching import launch
from kangaroo.engine.cache import ForwardMeta, KVCache

EPS = 1e-5
slow = pytest.mark.slow
FORMATS = [torch.bfloat16, *(pytest.param(x, marks=slow) for x in DTYPES[:2])]


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
def test_embeddings_are_rows(dtype):
    table_VK = numbers(50, 40, dtype=dtype)
    tokens_N = torch.tensor([3, 49, 0], device=DEVICE)
    assert torch.equal(layers.embed(tokens_N, table_VK), table_VK[tokens_N])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_parts_are_added_and_normed(dtype):
    x, parts = numbers(3, 72, dtype=dtype), numbers(4, 3, 72)
    weight = numbers(72, dtype=dtype)
    exact = x.double() + parts.double().sum(0)
    total, normed = layers.add_and_norm(x, parts, weight, EPS)
    assert_close(total, exact, dtype)
    assert_close(normed, exact_norm(exact, weight.double(), EPS), dtype)
    same, normed = layers.add_and_norm(x, None, weight, EPS)
    assert same is x
    assert_close(normed, exact_norm(x.double(), weight.double(), EPS), dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [pytest.param(1, marks=slow), 19, pytest.param(70, marks=slow)])
def test_products(tokens, dtype):
    """Of sizes that fill no tile."""
    x, weight, bias = numbers(tokens, 150, dtype=dtype), numbers(37, 150, dtype=dtype), None
    for parts in (1, 4):
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert_close(layers.product(x, weight, bias, parts).sum(0), exact, torch.float32)
        bias = numbers(37, dtype=dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [19, pytest.param(70, marks=slow)])
def test_gate_and_up(tokens, dtype):
    x, gate, up = (numbers(n, 150, dtype=dtype, seed=i) for i, n in enumerate((tokens, 37, 37)))
    exact = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert_close(layers.gate_and_up(x, gate, up), exact, dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_choice_is_the_likeliest_token_and_of_equals_the_lowest(dtype):
    x, weight = numbers(19, 40, dtype=dtype), numbers(75, 40, dtype=dtype)
    weight[[70, 40, 3]] = weight[50] * 4  # three equal rows, in several tiles
    head = layers.Head(weight, sizes_of(1, 1, 16, 40))
    logits = head(x)
    ids, chances = head.choose(x)
    order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, order.indices[:, :2])
    assert [3, 40] in ids.tolist()
    exact = logits.double().softmax(-1).gather(1, ids)
    torch.testing.assert_close(chances.double(), exact, rtol=1e-5, atol=1e-7)
    listed = torch.arange(75, device=DEVICE) * 2 + 1  # a part of a vocabulary
    assert torch.equal(head.choose(x, ids_O=listed).ids_M2, ids * 2 + 1)


def sizes_of(heads: int, kv_heads: int, size: int, hidden: int) -> Sizes:
    return Sizes(hidden, heads, kv_heads, size, 4 * hidden, EPS, size**-0.5)


def attention_layer(sizes: Sizes, dtype: torch.dtype, biased: bool, norms: bool) -> LayerWeights:
    hidden, of_q, of_k = (
        sizes.hidden,
        sizes.heads * sizes.head_size,
        sizes.kv_heads * sizes.head_size,
    )
    layer = LayerWeights(o=numbers(hidden, of_q, dtype=dtype))
    for i, (name, outputs) in enumerate((("q", of_q), ("k", of_k), ("v", of_k))):
        scale = hidden**-0.5
        setattr(layer, name, numbers(outputs, hidden, dtype=dtype, seed=i) * scale)
        if biased:
            setattr(layer, f"{name}_bias", numbers(outputs, dtype=dtype, seed=i))
        if norms and name != "v":
            setattr(layer, f"{name}_norm", numbers(sizes.head_size, dtype=dtype, seed=i))
    return layer


def rotated(x_NHD, cos_ND, sin_ND):
    first, second = x_NHD.chunk(2, -1)
    return x_NHD * cos_ND[:, None] + torch.cat([-second, first], -1) * sin_ND[:, None]


# heads, key heads, their size; biases; norms of queries and keys
ATTENTION = [
    (2, 1, 16, False, False),
    (3, 3, 96, True, False),
    (4, 2, 80, False, True),
    (8, 1, 64, True, True),
    (5, 1, 256, False, True),
]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(
    "case", [x if i == 2 else pytest.param(x, marks=slow) for i, x in enumerate(ATTENTION)], ids=str
)
def test_attention_of_a_layer(case, dtype):
    """Queries, keys and values, rotation, the cache, and attention over it, of two rows."""
    heads, kv_heads, size, biased, norms = case
    sizes, tokens, slots, starts = sizes_of(heads, kv_heads, size, 48), 3, 80, (62, 5)
    layer = attention_layer(sizes, dtype, biased, norms)
    x_ND = numbers(2 * tokens, 48, dtype=dtype)
    cos_RTD, sin_RTD = (numbers(2, tokens, size // 2, dtype=dtype, seed=i) for i in (0, 1))
    rope = tuple(torch.cat([half, half], -1) for half in (cos_RTD, sin_RTD))
    cache = KVCache(3, slots, kv_heads, size, dtype, [DEVICE])
    cache.keys[0].copy_(numbers(3 * slots, kv_heads, size, dtype=dtype, seed=5))
    cache.values[0].copy_(numbers(3 * slots, kv_heads, size, dtype=dtype, seed=6))
    slots_RT = torch.tensor(starts, device=DEVICE)[:, None] + torch.arange(tokens, device=DEVICE)
    hidden_RTE = torch.arange(slots, device=DEVICE) > slots_RT[..., None]
    bias = torch.zeros(hidden_RTE.shape, dtype=dtype, device=DEVICE).masked_fill(
        hidden_RTE, -torch.inf
    )
    meta = ForwardMeta(slots_RT, slots_RT, bias[:, None], slots, slice(1, 3), rope, recordable=True)
    stack = layers.Stack([layer], sizes)
    found = stack._attend(x_ND, cache, meta, layers.paths(meta), 0, False)
    found = found.view(-1, heads, size)
    exact = {}
    for name in "qkv":
        y = x_ND.double() @ getattr(layer, name).double().T
        if biased:
            y += getattr(layer, f"{name}_bias").double()
        y = y.view(2 * tokens, -1, size)
        if norms and name != "v":
            y = exact_norm(y, getattr(layer, f"{name}_norm").double(), EPS)
        if name != "v":
            y = rotated(y, *(x.flatten(0, 1).double() for x in rope))
        exact[name] = y
    written = (slots_RT + torch.tensor([[1], [2]], device=DEVICE) * slots).flatten()
    assert_close(cache.keys[0][written], exact["k"], dtype)
    assert_close(cache.values[0][written], exact["v"], dtype)
    for n in range(2 * tokens):
        row, end = 1 + n // tokens, int(slots_RT.flatten()[n]) + 1
        seen = slice(row * slots, row * slots + end)
        wanted = exact_attention(
            exact["q"][n], cache.keys[0][seen], cache.values[0][seen], sizes.scaling
        )
        assert_close(found[n], wanted, dtype)


def test_what_is_no_token_writes_nothing():
    sizes = sizes_of(2, 1, 16, 48)
    layer, cache = (
        attention_layer(sizes, torch.float32, False, False),
        KVCache(1, 8, 1, 16, torch.float32, [DEVICE]),
    )
    slots_RT = torch.arange(2, device=DEVICE)[None]
    bias = torch.full((1, 1, 2, 8), -torch.inf, device=DEVICE)
    bias[0, 0, 0, 0] = 0
    rope = (torch.ones(1, 2, 16, device=DEVICE), torch.zeros(1, 2, 16, device=DEVICE))
    meta = ForwardMeta(slots_RT, slots_RT, bias, 8, slice(0, 1), rope, recordable=True)
    stack = layers.Stack([layer], sizes)
    out = stack._attend(numbers(2, 48), cache, meta, layers.paths(meta), 0, False)
    assert cache.keys[0][0].any() and not cache.keys[0][1:].any()
    assert out[0].any() and not out[1].any()
