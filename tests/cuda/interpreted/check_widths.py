"""A token's bits are the same at every width, and however attention is divided; numbers have far
exponents, so that another order of a sum is seen.

Shapes: N tokens, K inputs, O outputs.
"""

from dataclasses import replace

import check_models
import pytest
import torch
from check_models import DEVICE, SMALLEST, filled_cache, meta_of, model, random_tokens, slow
from torch import Tensor

from kangaroo.cuda import launching, layers
from kangaroo.cuda.backend import CudaBackend
from kangaroo.cuda.launching import PARTS, Card
from kangaroo.cuda.layers import Head, Stack
from kangaroo.engine.backend import Sizes
from kangaroo.engine.tree import Tree
from kangaroo.models.layer_weights import layer_weights

WIDTHS = [1, 3, 16, 64, 128, 256, 520]
FORMATS = [torch.bfloat16, *(pytest.param(x, marks=slow) for x in check_models.DTYPES[:2])]
INTERPRETED = pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has a card of its own")
# By which attention is divided into pieces, into one program, and into a high one.
CARDS = [Card(processors, 227 << 10, rows) for processors, rows in ((10**6, 16), (0, 16), (0, 64))]
ATTENDED = [("llama", torch.float32, SMALLEST)] + [  # rounding would hide much
    pytest.param(name, dtype, {"num_hidden_layers": 1} | options, marks=slow)
    for name, dtype, options in (
        ("llama", torch.bfloat16, SMALLEST),
        ("llama", torch.float16, {"head_dim": 64, "num_attention_heads": 8}),
        ("qwen2", torch.float32, {"head_dim": 80}),
        ("qwen3", torch.bfloat16, {"head_dim": 128}),
        ("llama-biased", torch.float16, {"head_dim": 96}),
        ("llama-widest", torch.bfloat16, {}),
    )
]


@pytest.fixture
def on_card(monkeypatch):
    """Divide the work as for another card."""
    return lambda card: monkeypatch.setattr(launching, "card_of", lambda device: card)


def far_numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    numbers = torch.randn(shape, generator=generator)
    exponents = torch.randint(-6, 7, shape, generator=generator)
    return (numbers * 2.0**exponents).to(DEVICE, dtype)


@INTERPRETED
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["linear", "gate and up", "choose"])
def test_a_products_bits_do_not_depend_on_the_width(name, dtype, on_card):
    """On a card of few processors, so that programs have 64 to 256 tokens, and sum the parts."""
    on_card(Card(4, 227 << 10, rows=64))
    x_NK = far_numbers(WIDTHS[-1], 200, dtype=dtype)
    first_OK = far_numbers(75, 200, dtype=dtype)
    second_OK = far_numbers(75, 200, dtype=dtype).roll(1)
    bias_O = far_numbers(75, dtype=dtype)
    tiles = set()

    def run(tokens: int) -> Tensor:
        part_NK = x_NK[:tokens]
        if name == "linear":
            folds = launching.folds_parts(first_OK, 75, tokens)
            tiles.add(launching.tile(first_OK, 75, tokens, PARTS, folds=folds)["TOKENS"])
            y_PNO = layers.product(part_NK, first_OK, bias_O, PARTS)
            tiles.add(len(y_PNO))
            return sum(y_PNO[1:], start=y_PNO[0])  # not rounded, which would hide much
        if name == "choose":
            head = Head(first_OK, Sizes(200, 1, 1, 16, 160, 1e-5, 0.25))
            return torch.stack([x[0].double() for x in head.choose(part_NK[None])], 1)
        return layers.gate_and_up(part_NK, first_OK, second_OK)

    widest = run(WIDTHS[-1])
    narrower = [3, 128] if dtype == torch.bfloat16 else WIDTHS[:-1]
    assert all(torch.equal(run(tokens), widest[:tokens]) for tokens in narrower)
    if name == "linear" and dtype != torch.float32:
        assert tiles == {1, PARTS, 64, 128}


@INTERPRETED
@pytest.mark.parametrize("name, dtype, options", ATTENDED)
def test_attention_has_the_same_bits_however_it_is_divided(name, dtype, options, on_card):
    """Trees and prompts, which a window cuts off."""
    lm = model(name, dtype, **options)
    layer = replace(layer_weights(lm.layers[0]), feed_forward_norm=None, gate=None)
    parents = torch.tensor([[0, 0, 0, 1]], device=DEVICE)
    tree = meta_of(lm, Tree(parents, max_depth=4), [3, 190])
    lm.decode_by(CudaBackend(kernel_sizes=lm.sizes()))
    prompt = lm.chunk(120, 138, 0, check_models.SLOTS)
    for meta, shape in ((tree, (2, 4)), (prompt, (1, 18))):
        x_RTD = lm.embed(random_tokens(*shape))
        for window in (0, 64) if meta is tree else (0,):
            results = []
            for card in CARDS:
                on_card(card)
                stack = Stack([layer], lm.sizes(), window)
                results.append(stack(x_RTD, filled_cache(lm, 2), meta, range(1)))
            assert all(torch.equal(x, results[0]) for x in results[1:]), (shape, window)


@slow
@pytest.mark.parametrize("dtype", check_models.DTYPES, ids=str)
def test_a_prompt_in_one_pass_has_the_bits_of_its_last_tokens_in_passes_of_fewer(dtype, on_card):
    """Products of 64 to 256 tokens, attention of 64 and 128 queries; and where the least are 16."""
    lm = model("llama", dtype, **SMALLEST)
    lm.decode_by(CudaBackend(kernel_sizes=lm.sizes()))
    tokens_1N = random_tokens(1, WIDTHS[-1])
    cache = filled_cache(lm, 1, slots=640)
    stop = 60 + WIDTHS[-1]

    def run(tokens: int, rows: int) -> Tensor:
        if DEVICE.type == "cpu":
            on_card(Card(4, 227 << 10, rows=rows))
        meta = lm.chunk(stop - tokens, stop, 0, 640)
        x_1ND, _ = lm.run(lm.embed(tokens_1N[:, -tokens:]), cache, meta, range(lm.n_layers))
        return lm.logits(x_1ND)[0]

    whole = run(WIDTHS[-1], rows=64)
    for tokens in WIDTHS[:-1]:
        for rows in (16, 64):
            assert torch.equal(run(tokens, rows), whole[-tokens:]), (tokens, rows)
