"""Draft steps in training attend as their mask says, and no matrix of scores outgrows the text.

Shapes: R rows, H query heads, K key heads, T tokens, C head size.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kangaroo.models.attention import attention
from kangaroo.models.draft_steps import DraftSteps, StepAttention

LAYER = SimpleNamespace(layer_idx=0)
SHAPES = {"plain": (2, 3, 3), "grouped": (1, 4, 2)}


def by_definition(q_RHTC: Tensor, keys: list[Tensor], values: list[Tensor], first: int) -> Tensor:
    """One score at a time, after loops over tokens and steps."""
    width = q_RHTC.shape[2]
    last = len(keys)
    group = q_RHTC.shape[1] // keys[0].shape[1]
    visible = torch.zeros(width, last, width, dtype=torch.bool)
    for token in range(width):
        visible[token, 0, first : max(token + 2 - last, first)] = True
        for step in range(2, last + 1):
            if token >= last - step:
                visible[token, step - 1, token - (last - step)] = True
    keys_RHEC = torch.cat(keys, 2).repeat_interleave(group, 1)
    values_RHEC = torch.cat(values, 2).repeat_interleave(group, 1)
    scores = (q_RHTC @ keys_RHEC.mT * 0.3).masked_fill(~visible.flatten(1), -torch.inf)
    return (scores.softmax(-1) @ values_RHEC).transpose(1, 2)


def steps_of(shape: str, width: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    rows, heads, kv_heads = SHAPES[shape]
    generator = torch.Generator().manual_seed(width)
    q_RHTC = torch.randn(rows, heads, width, 16, generator=generator)
    kept = torch.randn(8, rows, kv_heads, width, 16, generator=generator)
    return q_RHTC.to(dtype).requires_grad_(), [x.to(dtype).requires_grad_() for x in kept]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("width", [3, 4, 5, 70])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_attends_as_its_mask_says_and_so_do_its_gradients(dtype, shape, width, first):
    """In float32 sums differ in order: 1e-5 of values around 1. Bfloat16 rounds each to 2^-8."""
    bias_11TT = None
    if first:
        bias_11TT = torch.ones(1, 1, width, width, dtype=torch.bool).tril()
        bias_11TT[..., 1:, 0] = False
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    q_RHTC, kept = steps_of(shape, width, dtype)
    steps = kept_steps(kept, bias_11TT, first)
    valid = slice(3 + first, None)  # drafts of tokens before these began before the text
    out_RTHC, _ = attention(LAYER, q_RHTC, kept[3], kept[7], steps, scaling=0.3)
    wanted = [x.detach().float().requires_grad_() for x in (q_RHTC, *kept)]
    expected_RTHC = by_definition(wanted[0], wanted[1:5], wanted[5:], first)
    change_RTHC = torch.randn(out_RTHC.shape, generator=torch.Generator().manual_seed(1))
    change_RTHC[:, : valid.start] = 0
    out_RTHC.backward(change_RTHC.to(dtype))
    expected_RTHC.backward(change_RTHC)
    got_RTHC, wanted_RTHC = out_RTHC[:, valid].float(), expected_RTHC[:, valid]
    torch.testing.assert_close(got_RTHC, wanted_RTHC, rtol=tolerance, atol=tolerance)
    for x, like in zip((q_RHTC, *kept), wanted, strict=True):
        torch.testing.assert_close(x.grad.float(), like.grad, rtol=tolerance, atol=2 * tolerance)


def kept_steps(kept: list[Tensor], bias_11TT: Tensor | None = None, first: int = 0) -> DraftSteps:
    steps = DraftSteps(bias_11TT, causal_from=first)
    for k_RKTC, v_RKTC in zip(kept[:4], kept[4:], strict=True):
        steps.update(k_RKTC, v_RKTC, 0)
    return steps


def test_what_has_no_kernel_attends_by_the_mask():
    """With a cap so high that it changes nothing, scores are those without one."""
    q_RHTC, kept = steps_of("grouped", 70, torch.float32)
    steps = kept_steps(kept)
    plain, capped = (
        attention(LAYER, q_RHTC, kept[3], kept[7], steps, scaling=0.3, softcap=cap)[0]
        for cap in (None, 1e4)
    )
    torch.testing.assert_close(plain, capped, rtol=1e-3, atol=1e-4)  # by tanh, in float32
    assert not torch.equal(plain, capped)


def test_no_matrix_of_scores_is_made():
    """What a step of a text of 2,048 tokens allocates is of the size of its states."""
    width, largest = 2048, [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [x for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x)]
            largest[0] = max([largest[0], *(x.numel() for x in tensors)])
            return out

    q_RHTC, kept = steps_of("grouped", width, torch.float32)
    steps = kept_steps(kept)
    with Sizes():
        out_RTHC, _ = attention(LAYER, q_RHTC, kept[3], kept[7], steps, scaling=0.3)
        out_RTHC.sum().backward()
    assert largest[0] == q_RHTC.numel()


def test_cuda_kernels_take_what_they_get():
    """Shapes and formats alone: nothing is computed, and no GPU is needed."""
    context = SimpleNamespace()
    context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
    q_RHTC = torch.empty(2, 4, 70, 64, dtype=torch.bfloat16, device="meta")
    k_RKTC = torch.empty(2, 2, 70, 64, dtype=torch.bfloat16, device="meta")
    out_RHTC = StepAttention.forward(context, 0.3, 1, q_RHTC, *[k_RKTC] * 6)
    assert out_RHTC.shape == q_RHTC.shape and out_RHTC.dtype == torch.bfloat16
    assert context.rest[-1][-4:-2] == (0.0, True)  # those of CUDA's kernel
    gradients = StepAttention.backward(context, out_RHTC)[2:]
    assert [x.shape for x in gradients] == [q_RHTC.shape, *[k_RKTC.shape] * 6]
    assert all(x.dtype == torch.bfloat16 for x in gradients)
