"""Whole tiny models, decoding and over whole texts: what transformers' modules compute, and bits
that depend on nothing beside a token. And what they show too little of: rounding, choices among
equals, and what is no token.

Shapes: B or R rows, N nodes or tokens of a row, T tokens of a text, S slots.
"""

import itertools
import os

import pytest
import torch
import triton
import triton.language as tl
from helpers import VOCABULARY, tiny_model
from torch import Tensor

from kangaroo.cuda import kernels, layers
from kangaroo.cuda.backend import CudaBackend
from kangaroo.cuda.launching import launch
from kangaroo.cuda.layers import Head, Stack
from kangaroo.engine.backend import LayerWeights, Sizes
from kangaroo.engine.cache import ForwardMeta, KVCache
from kangaroo.engine.tree import Tree
from kangaroo.models.layer_weights import layer_weights
from kangaroo.models.target import TargetModel

slow = pytest.mark.slow
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
# What rounding leaves of numbers of about 1, to the scale of the largest of a result.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = list(TOLERANCE)
FORMATS = [torch.bfloat16, *(pytest.param(x, marks=slow) for x in DTYPES[:2])]
SLOTS = 200
SMALLEST = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
FAMILIES = {
    "llama": {"num_key_value_heads": 4},
    "llama-biased": {"attention_bias": True},
    "llama-wide": {"head_dim": 96},
    "llama-widest": {"head_dim": 256, "num_key_value_heads": 1},
    "qwen2": {"head_dim": 80},
    "qwen3": {"head_dim": 40, "num_attention_heads": 2, "num_key_value_heads": 1},
    "mistral": {"hidden_size": 72, "intermediate_size": 200, "num_key_value_heads": 1},
}

NAMES = [x if x.startswith("q") else pytest.param(x, marks=slow) for x in FAMILIES]
of_families = pytest.mark.parametrize("name", NAMES)
TREE = [0, 0, 0, 1, 1, 3, 2, 5]  # of each node its parent
EVERY = [0, 1], [4, 6, 7]  # rows and leaves
# Name, options, format, starts, and the rows and leaves that are decoded alone.
BITS = [
    ("llama", SMALLEST, torch.bfloat16, [3, 62], [1], [6]),
    ("llama", {"head_dim": 64, "num_attention_heads": 8}, torch.bfloat16, [128, 129], *EVERY),
    ("qwen3", {"head_dim": 32}, torch.float16, [63, 64], *EVERY),
    ("qwen2", {"head_dim": 80}, torch.float32, [120, 127], *EVERY),
    ("mistral", {"num_attention_heads": 8}, torch.float16, [125, 190], *EVERY),
]


def model(name: str, dtype: torch.dtype = torch.float32, **options: object) -> TargetModel:
    fields = {"num_hidden_layers": 2} | FAMILIES[name] | options
    return TargetModel(tiny_model(name.split("-")[0], dtype=dtype, **fields).to(DEVICE))


def filled_cache(lm: TargetModel, rows: int, slots: int = SLOTS) -> KVCache:
    cache = lm.new_cache(rows, slots)
    for i, cached in enumerate((*cache.keys, *cache.values)):
        generator = torch.Generator().manual_seed(i)
        one_row = torch.randn((slots, *cached.shape[1:]), generator=generator)
        cached.copy_(one_row.repeat(rows, 1, 1))
    return cache


def stack_of(lm: TargetModel, **options: int) -> Stack:
    return Stack(list(map(layer_weights, lm.layers)), lm.sizes(), **options)


def meta_of(lm: TargetModel, tree: Tree, starts: list[int]) -> ForwardMeta:
    start_B = torch.tensor(starts, device=DEVICE)
    return lm.forward_meta(tree, start_B, max(starts) + tree.size, SLOTS)


def by_kernels(
    lm: TargetModel, cache: KVCache, tree: Tree, starts: list[int], tokens_BN: Tensor
) -> Tensor:
    meta = meta_of(lm, tree, starts)
    x_BND = stack_of(lm)(lm.embed(tokens_BN), cache, meta, range(lm.n_layers))
    head = Head(lm.head.weight, lm.sizes())
    logits = head(x_BND.flatten(0, 1), lm.hf.model.norm.weight)
    return logits.unflatten(0, tokens_BN.shape)


def random_tokens(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(VOCABULARY, shape, generator=generator).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=slow)])
@of_families
def test_kernels_compute_what_the_modules_compute(name, dtype):
    lm, starts, tokens_BN = model(name, dtype), [3, 62, 140], random_tokens(3, 3)
    tree = Tree.chain(3, DEVICE)
    eager_cache, cache = filled_cache(lm, 3), filled_cache(lm, 3)
    meta = meta_of(lm, tree, starts)
    x_BND, _ = lm.run(lm.embed(tokens_BN), eager_cache, meta, range(lm.n_layers))
    eager = lm.logits(x_BND).float()
    tolerance = 1e-4 if dtype == torch.float32 else 0.4
    logits = by_kernels(lm, cache, tree, starts, tokens_BN)
    torch.testing.assert_close(logits, eager, rtol=0, atol=tolerance)
    for ours, theirs in zip(cache.values, eager_cache.values, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_a_node_sees_its_whole_path_when_it_is_computed_alone():
    """A drafter computes a level of its tree at a time: a path has more nodes than the level, and
    they do not lie side by side. What is left of all rows' block has gaps."""
    lm, parents = model("llama", **SMALLEST), [0, 0, 0, 2, 2, 4, 4, 6]
    x_BND, cache = lm.embed(random_tokens(2, len(parents))), filled_cache(lm, 2)
    meta = meta_of(lm, Tree(torch.tensor([parents], device=DEVICE), max_depth=4), [3, 62])
    together = stack_of(lm)(x_BND, cache, meta, range(1))
    keys = cache.keys[0].clone()
    alone = stack_of(lm)(x_BND[:, -1:], cache, meta.narrow(len(parents) - 1, 1), range(1))
    assert torch.equal(alone[:, 0], together[:, -1]) and torch.equal(cache.keys[0], keys)


def path_to(node: int) -> list[int]:
    return [node] if node == 0 else [*path_to(TREE[node]), node]


@pytest.mark.parametrize("case", [BITS[0], *(pytest.param(x, marks=slow) for x in BITS[1:])])
def test_each_node_of_a_tree_in_a_batch_has_the_bits_of_its_token_alone(case):
    """The same tokens decoded one by one, each path in the slots of its positions."""
    name, options, dtype, starts, rows, leaves = case
    lm, tokens_BN = model(name, dtype, **options), random_tokens(2, len(TREE))
    tree = Tree(torch.tensor([TREE], device=DEVICE), max_depth=4)
    together = by_kernels(lm, filled_cache(lm, 2), tree, starts, tokens_BN)
    alone = Tree.chain(1, DEVICE)
    for row, leaf in itertools.product(rows, leaves):
        cache = filled_cache(lm, 1)
        for depth, node in enumerate(path_to(leaf)):
            token_11 = tokens_BN[row, node][None, None]
            logits = by_kernels(lm, cache, alone, [starts[row] + depth], token_11)
            assert torch.equal(logits[0, 0], together[row, node]), (row, node)


@slow
@pytest.mark.parametrize("width", [2, 7, 16, 17, 19, 33, 65, 121])
def test_a_chain_of_any_width_has_the_bits_of_one_token(width):
    """Wider ones fill further accumulators, and more programs; some tokens of a long one are
    enough."""
    lm, tokens_1N = model("llama", torch.bfloat16, **SMALLEST), random_tokens(1, width)
    cache = filled_cache(lm, 1)
    together = by_kernels(lm, cache, Tree.chain(width, DEVICE), [60], tokens_1N)
    alone = Tree.chain(1, DEVICE)
    for n in {1, width - 1}:
        logits = by_kernels(lm, cache, alone, [60 + n], tokens_1N[:, n : n + 1])
        assert torch.equal(logits[0, 0], together[0, n])


def over_texts(lm: TargetModel, tokens_RT: Tensor, taps: tuple[int, ...] = ()) -> Tensor:
    meta = lm.chunk(0, tokens_RT.shape[1], 0, tokens_RT.shape[1])
    x_RTD, tapped = lm.run(lm.embed(tokens_RT), None, meta, range(lm.n_layers), taps)
    return torch.stack([*tapped.values(), x_RTD])


def with_stack(lm: TargetModel) -> TargetModel:
    return lm.decode_by(CudaBackend(kernel_sizes=lm.sizes()))


@pytest.mark.parametrize("dtype", FORMATS)
@of_families
def test_kernels_compute_what_the_modules_compute_of_whole_texts(name, dtype, monkeypatch):
    lm, tokens_RT = model(name, dtype), random_tokens(2, 9)
    expected = over_texts(lm, tokens_RT, (1,))
    calls, run = [], Stack.run_text
    monkeypatch.setattr(Stack, "run_text", lambda *args: calls.append(1) or run(*args))
    states = over_texts(with_stack(lm), tokens_RT, (1,))
    assert len(calls) == 2  # up to the tap, and from there on
    # modules round more often: after each factor of a rotation, and between silu and its product
    scale = expected.abs().max().item()
    torch.testing.assert_close(states, expected, rtol=0, atol=4 * TOLERANCE[dtype] * scale)


def test_a_texts_bits_depend_on_no_other_row_and_no_padding_and_a_mask_is_for_modules():
    lm, tokens_RT = with_stack(model("qwen3", num_hidden_layers=1)), random_tokens(3, 6)
    together = over_texts(lm, tokens_RT)[0]
    others = torch.cat([random_tokens(4, 6)[3:], tokens_RT[1:]])
    assert torch.equal(over_texts(lm, others)[0, 1:], together[1:])
    changed = tokens_RT.clone()
    changed[1, 4:] = 0
    assert torch.equal(over_texts(lm, changed)[0, 1, :4], together[1, :4])
    meta, x_RTD = lm.chunk(0, 6, 0, 6), lm.embed(tokens_RT)
    assert lm.fast_layers.takes(x_RTD, None, meta)
    meta.bias_R1TE = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=DEVICE).tril()
    assert not lm.fast_layers.takes(x_RTD, None, meta)


def test_a_window_begins_at_a_block():
    lm, starts, tokens_BN = model("llama", **SMALLEST), [62, 140], random_tokens(2, 3)
    meta = meta_of(lm, Tree.chain(3, DEVICE), starts)
    x_BND, caches = lm.embed(tokens_BN), (filled_cache(lm, 2), filled_cache(lm, 2))
    near_BND = stack_of(lm, window=64)(x_BND, caches[0], meta, range(1))
    expected_BND, _ = lm.run(x_BND, caches[1], meta.within(64), range(1))
    torch.testing.assert_close(near_BND, expected_BND, rtol=0, atol=1e-4)
    whole_BND, _ = lm.run(x_BND, caches[1], meta, range(1))
    assert torch.equal(expected_BND[0], whole_BND[0]) and not near_BND[1].allclose(whole_BND[1])


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
    layer, cache = LayerWeights(), KVCache.empty(1, 8, 1, 16, torch.float32, [DEVICE])
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
