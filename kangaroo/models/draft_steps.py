"""Attention over the draft steps of a text, in training: a causal block and a few diagonals.

At draft step s a token sees the keys of step 1 up to the start of its draft, s - 1 tokens back, and
of each later step one key: that of a token of its draft. A matrix of all these scores would be
almost empty. Here torch's causal kernel computes the block, and a few products the diagonals.

Shapes: R rows, T tokens of a text, K key/value heads, G query heads of each, H = K G query heads, C
head size, S draft steps, E = S T keys, N tokens of the block.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Pair = tuple[Tensor, Tensor]


class DraftSteps:
    """Keys and values of a text's draft steps so far. Attention layers take it as their cache and
    as their mask.

    Args:
        bias_R1TT: the text's mask at step 1, as in `ForwardMeta`.
        causal_from: the first token that all later ones see; None if the mask is not causal.
    """

    def __init__(self, bias_R1TT: Tensor | None, causal_from: int | None):
        self.bias_R1TT = bias_R1TT
        self.causal_from = causal_from
        self.keys = defaultdict[int, list[Tensor]](list)  # by layer, of each step
        self.values = defaultdict[int, list[Tensor]](list)

    def update(
        self, k_RKTC: Tensor, v_RKTC: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> Pair:
        self.keys[layer_idx].append(k_RKTC.to(v_RKTC.dtype))
        self.values[layer_idx].append(v_RKTC)
        return k_RKTC, v_RKTC

    def attend(self, layer: int, q_RHTC: Tensor, scaling: float) -> Tensor | None:
        """A layer's attention at its last step, `[R, H, T, C]`, without scores that no token sees;
        None if torch has no kernel for that, or the text is shorter than a draft."""
        keys = self.keys[layer]
        values = self.values[layer]
        width, size = q_RHTC.shape[2:]
        first = self.causal_from
        has_kernel = q_RHTC.is_cpu or (values[0].dtype.itemsize == 2 and size % 8 == 0)
        if first is None or not has_kernel or not first < len(keys) <= width - first:
            return None
        q_RHTC = q_RHTC.to(values[0].dtype)
        return StepAttention.apply(scaling, first, q_RHTC, *keys, *values)

    def joined(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """A layer's keys and values of all steps, `[R, K, E, C]`, and the mask `[R, 1, T, E]` of
        the last one."""
        keys = self.keys[layer]
        values = self.values[layer]
        bias_R1TT = self.bias_R1TT
        if len(keys) == 1:
            return keys[0], values[0], bias_R1TT
        if bias_R1TT is None:
            width = keys[0].shape[2]
            bias_R1TT = keys[0].new_ones(1, 1, width, width, dtype=torch.bool).tril()
        visible_R1TT = bias_R1TT if bias_R1TT.dtype == torch.bool else bias_R1TT == 0
        diagonals = [visible_R1TT.tril(-back).triu(-back) for back in range(len(keys) - 1)]
        visible_R1TE = torch.cat([visible_R1TT.tril(1 - len(keys)), *reversed(diagonals)], -1)
        return torch.cat(keys, 2), torch.cat(values, 2), visible_R1TE


class StepAttention(torch.autograd.Function):
    """Attention of the last of S draft steps; see `DraftSteps.attend`. Block and diagonals are
    joined by the sums of their softmaxes. The causal kernel's backward pass gets the joined output
    and sum, and gives the block's part of the gradients, as in ring attention (arXiv
    2310.01889)."""

    @staticmethod
    def forward(ctx: Any, scaling: float, first: int, q_RHTC: Tensor, *kept: Tensor) -> Tensor:
        """`kept` are the keys of all steps, `[R, K, T, C]`, and then their values."""
        steps = len(kept) // 2
        keys = kept[:steps]
        values = kept[steps:]
        by_head = (keys[0].shape[1], -1)
        width = q_RHTC.shape[2]
        late = slice(first + steps - 1, None)  # tokens that see tokens before their draft,
        true = slice(first, width - steps + 1)  # and the tokens that they see there
        block_RHNC, sum_RHN, rest = causal(
            q_RHTC[:, :, late], keys[0][:, :, true], values[0][:, :, true], scaling
        )
        q_RKGTC = q_RHTC.unflatten(1, by_head)
        scores_RKGTS = q_RHTC.new_full((*q_RKGTC.shape[:4], steps), -torch.inf, dtype=torch.float32)
        scores_RKGTS[..., late, 0] = sum_RHN.unflatten(1, by_head)
        for step, here, there in diagonals(steps):
            products = q_RKGTC[..., here, :].float() * keys[step][:, :, None, there]
            scores_RKGTS[..., here, step] = products.sum(-1) * scaling
        weights_RKGTS = scores_RKGTS.softmax(-1)
        out_RKGTC = torch.zeros_like(q_RKGTC, dtype=torch.float32)
        out_RKGTC[..., late, :] = block_RHNC.unflatten(1, by_head)
        out_RKGTC *= weights_RKGTS[..., :1]
        for step, here, there in diagonals(steps):
            weight_RKGN1 = weights_RKGTS[..., here, step, None]
            out_RKGTC[..., here, :] += weight_RKGN1 * values[step][:, :, None, there]
        out_RHTC = out_RKGTC.flatten(1, 2).to(q_RHTC.dtype)
        sum_RHT = scores_RKGTS.logsumexp(-1).flatten(1, 2)
        ctx.save_for_backward(q_RHTC, out_RHTC, sum_RHT, weights_RKGTS, *kept)
        ctx.rest = scaling, late, true, rest
        return out_RHTC

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `forward`'s tensors."""
        q_RHTC, out_RHTC, sum_RHT, weights_RKGTS, *kept = ctx.saved_tensors
        scaling, late, true, rest = ctx.rest
        steps = len(kept) // 2
        keys = kept[:steps]
        values = kept[steps:]
        (grad_RHTC,) = gradients
        dkept = [torch.zeros_like(x, dtype=torch.float32) for x in kept]
        dq_RHTC = torch.zeros_like(q_RHTC, dtype=torch.float32)
        dq_RHTC[:, :, late], dkept[0][:, :, true], dkept[steps][:, :, true] = causal_backward(
            grad_RHTC[:, :, late],
            q_RHTC[:, :, late],
            keys[0][:, :, true],
            values[0][:, :, true],
            out_RHTC[:, :, late],
            sum_RHT[:, :, late],
            rest=rest,
            scaling=scaling,
        )
        by_head = (keys[0].shape[1], -1)
        q_RKGTC = q_RHTC.unflatten(1, by_head)
        dq_RKGTC = dq_RHTC.unflatten(1, by_head)
        grad_RKGTC = grad_RHTC.unflatten(1, by_head).float()
        mean_RKGT = (grad_RHTC.float() * out_RHTC).sum(-1).unflatten(1, by_head)
        for step, here, there in diagonals(steps):
            weight_RKGN = weights_RKGTS[..., here, step]
            gain_RKGN = (grad_RKGTC[..., here, :] * values[step][:, :, None, there]).sum(-1)
            dscore_RKGN = weight_RKGN * (gain_RKGN - mean_RKGT[..., here]) * scaling
            dq_RKGTC[..., here, :] += dscore_RKGN[..., None] * keys[step][:, :, None, there]
            dkeys_RKGNC = dscore_RKGN[..., None] * q_RKGTC[..., here, :]
            dkept[step][:, :, there] = dkeys_RKGNC.sum(2)
            dvalues_RKGNC = weight_RKGN[..., None] * grad_RKGTC[..., here, :]
            dkept[steps + step][:, :, there] = dvalues_RKGNC.sum(2)
        return None, None, dq_RHTC.to(q_RHTC.dtype), *(x.to(q_RHTC.dtype) for x in dkept)


def diagonals(steps: int) -> Iterator[tuple[int, slice, slice]]:
    """The later steps, each with the tokens that see a key of it, and the tokens of these keys."""
    for step in range(1, steps):
        back = steps - 1 - step
        yield step, slice(back, None), slice(None, -back or None)


def causal(q_RHNC: Tensor, k_RKNC: Tensor, v_RKNC: Tensor, scaling: float) -> tuple[Any, ...]:
    """Causal attention `[R, H, N, C]`, the logarithm of each softmax's sum `[R, H, N]`, and what
    else the kernel's backward pass takes."""
    inputs = for_kernel(q_RHNC, k_RKNC, v_RKNC)
    if not q_RHNC.is_cpu:
        out_RHNC, sum_RHN, *bounds, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            *inputs, is_causal=True, scale=scaling
        )
        return out_RHNC, sum_RHN, (*bounds, 0.0, True, seed, offset)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    out_RHNC, sum_RHN = kernel(*inputs, is_causal=True, scale=scaling)
    return out_RHNC, sum_RHN, (0.0, True)


def causal_backward(
    grad_RHNC: Tensor,
    q_RHNC: Tensor,
    k_RKNC: Tensor,
    v_RKNC: Tensor,
    out_RHNC: Tensor,
    sum_RHN: Tensor,
    rest: tuple[Any, ...],
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `causal`'s queries, keys and values."""
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
    if not q_RHNC.is_cpu:
        kernel = aten._scaled_dot_product_flash_attention_backward
    inputs = for_kernel(grad_RHNC, q_RHNC, k_RKNC, v_RKNC, out_RHNC)
    dq_RHNC, dk_RHNC, dv_RHNC = kernel(*inputs, sum_RHN.contiguous(), *rest, scale=scaling)
    by_head = (k_RKNC.shape[1], -1)
    return dq_RHNC, dk_RHNC.unflatten(1, by_head).sum(2), dv_RHNC.unflatten(1, by_head).sum(2)


def for_kernel(*tensors: Tensor) -> list[Tensor]:
    """The tensors with as many heads as the first one. On a CPU they are in float32: without
    instructions for bfloat16, torch's kernel is seven times as fast in it."""
    heads = tensors[0].shape[1]
    repeated = [x.repeat_interleave(heads // x.shape[1], 1) for x in tensors]
    return [x.float() if x.is_cpu else x for x in repeated]
