"""Whole texts by kernels: what transformers' modules compute, and bits that depend on no other row.

Shapes: R rows, T tokens.
"""

from __future__ import annotations

import pytest
import torch
from check_models import FAMILIES, model, random_tokens
from kernel_cases import DTYPES, TOLERANCE
from torch import Tensor

from kangaroo.cuda import texts
from kangaroo.cuda.layers import Stack
from kangaroo.models.layer_weights import layer_weights
from kangaroo.models.target import TargetModel

slow = pytest.mark.slow
FORMATS = [torch.bfloat16, *(pytest.param(x, marks=slow) for x in DTYPES[:2])]


def by_kernels(lm: TargetModel, tokens_RT: Tensor, taps: tuple[int, ...] = ()) -> Tensor:
    """As a model on a GPU runs, whose kernels decode."""
    lm.cuda_layers = Stack(list(map(layer_weights, lm.layers)), lm.sizes())
    return by_modules(lm, tokens_RT, taps)


def by_modules(lm: TargetModel, tokens_RT: Tensor, taps: tuple[int, ...] = ()) -> Tensor:
    meta = lm.chunk(0, tokens_RT.shape[1], 0, tokens_RT.shape[1])
    x_RTD, tapped = lm.run(lm.embed(tokens_RT), None, meta, range(lm.n_layers), taps)
    return torch.stack([*tapped.values(), x_RTD])


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "name", [x if x.startswith("q") else pytest.param(x, marks=slow) for x in FAMILIES]
)
def test_kernels_compute_what_the_modules_compute_of_whole_texts(name, dtype, monkeypatch):
    lm, tokens_RT = model(name, dtype), random_tokens(2, 19)
    expected = by_modules(lm, tokens_RT, (1,))
    calls, run = [], texts.run
    monkeypatch.setattr(texts, "run", lambda *args: calls.append(1) or run(*args))
    states = by_kernels(lm, tokens_RT, (1,))
    assert len(calls) == 2  # up to the tap, and from there on
    # modules round more often: after each factor of a rotation, and between silu and its product
    scale = expected.abs().max().item()
    torch.testing.assert_close(states, expected, rtol=0, atol=4 * TOLERANCE[dtype] * scale)


def test_a_texts_bits_depend_on_no_other_row_and_no_padding():
    lm, tokens_RT = model("qwen3", torch.float32), random_tokens(3, 12)
    together = by_kernels(lm, tokens_RT)[0]
    others = torch.cat([random_tokens(4, 12)[3:], tokens_RT[1:]])
    assert torch.equal(by_kernels(lm, others)[0, 1:], together[1:])
    changed = tokens_RT.clone()
    changed[1, 7:] = 0
    assert torch.equal(by_kernels(lm, changed)[0, 1, :7], together[1, :7])


def test_what_has_a_mask_runs_in_the_modules(monkeypatch):
    lm, tokens_RT = model("qwen2"), random_tokens(1, 6)
    lm.cuda_layers = Stack(list(map(layer_weights, lm.layers)), lm.sizes())
    meta, x_RTD = lm.chunk(0, 6, 0, 6), lm.embed(tokens_RT)
    assert texts.takes(x_RTD, meta)
    meta.bias_R1TE = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=x_RTD.device).tril()
    assert not texts.takes(x_RTD, meta)
