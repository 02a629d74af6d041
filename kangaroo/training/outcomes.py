"""A student's distribution as one over few outcomes: some tokens, and all others together.

Shapes: C positions, J tokens of each, O = J + 1 outcomes, K draft vocabulary.
"""

from __future__ import annotations

from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from kangaroo.cpu import native

LEAST = 1e-30  # a probability whose logarithm and reciprocal float32 can still hold


class Outcomes(torch.autograd.Function):
    """Log-probabilities of some tokens and of all others together, in float32; and the argmax.

    The gradient of the logits is written down at once. With g of the outcomes, s its sum and q the
    probabilities, a token among the outcomes has `g - s q`, any other `(g_rest / q_rest - s) q`.
    On a CPU native code does the same, without a copy of the logits in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        compute = forward_natively if runs_natively(logits_CK) else forward_by_tensors
        log_q_CO, largest_C, rest_C, best_C = compute(logits_CK, index_CJ, inside_CJ)
        ctx.save_for_backward(logits_CK, index_CJ, inside_CJ, log_q_CO, largest_C, rest_C)
        ctx.mark_non_differentiable(best_C)
        return log_q_CO, best_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        is_native = runs_natively(ctx.saved_tensors[0])
        compute: Any = backward_natively if is_native else backward_by_tensors
        return compute(gradients[0], *ctx.saved_tensors), None, None


def forward_by_tensors(
    logits_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row the outcomes' log-probabilities; the largest logit; the sum of the exponentials
    of all other tokens' logits, after it was subtracted from them; and its place.
    """
    largest_C = logits_CK.amax(-1).float()
    e_CK = logits_CK - largest_C[:, None]
    log_e_CJ = e_CK.gather(1, index_CJ) * inside_CJ
    rest_C = _cleared(e_CK.exp_(), index_CJ, inside_CJ).sum(-1)
    sum_C = rest_C + (log_e_CJ.exp() * inside_CJ).sum(-1)
    log_e_CO = torch.cat([log_e_CJ, rest_C.clamp(min=LEAST).log()[:, None]], -1)
    return log_e_CO - sum_C.log()[:, None], largest_C, rest_C, logits_CK.argmax(-1)


def backward_by_tensors(
    g_CO: Tensor,
    logits_CK: Tensor,
    index_CJ: Tensor,
    inside_CJ: Tensor,
    log_q_CO: Tensor,
    largest_C: Tensor,
    rest_C: Tensor,
) -> Tensor:
    """The gradient of the logits, from that of the outcomes and what the forward pass gave."""
    g_CJ, q_CO = g_CO[:, :-1] * inside_CJ, log_q_CO.exp()
    s_C1 = g_CJ.sum(-1, keepdim=True) + g_CO[:, -1:]
    rest_C1 = rest_C.clamp(min=LEAST)[:, None]
    scale_C1 = g_CO[:, -1:] / rest_C1 - s_C1 * q_CO[:, -1:] / rest_C1
    gradient_CK = (logits_CK - largest_C[:, None]).exp_().mul_(scale_C1)
    _cleared(gradient_CK, index_CJ, inside_CJ)
    gradient_CK.scatter_add_(1, index_CJ, (g_CJ - s_C1 * q_CO[:, :-1]) * inside_CJ)
    return gradient_CK.to(logits_CK.dtype)


def _cleared(x_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor) -> Tensor:
    """The same memory, with zeros for the tokens among the outcomes."""
    rows_C1 = torch.arange(len(x_CK), device=x_CK.device)[:, None] * x_CK.shape[1]
    x_CK.view(-1).index_fill_(0, (rows_C1 + index_CJ)[inside_CJ], 0)
    return x_CK


def runs_natively(logits_CK: Tensor) -> bool:
    """Whether native code takes them."""
    on_cpu = logits_CK.device.type == "cpu" and logits_CK.dtype in native.DTYPES
    return on_cpu and native.library() is not None


def forward_natively(
    logits_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`forward_by_tensors` by `cpp/outcomes.h`."""
    count, tokens = index_CJ.shape
    log_q_CO, largest_C, rest_C = (torch.empty(n) for n in ((count, tokens + 1), count, count))
    best_C = torch.empty(count, dtype=torch.long)
    results = log_q_CO, largest_C, rest_C, best_C
    _call("find_outcomes", [logits_CK, index_CJ, inside_CJ, *results])
    return results


def backward_natively(g_CO: Tensor, logits_CK: Tensor, *others: Tensor) -> Tensor:
    """`backward_by_tensors` by `cpp/outcomes.h`."""
    gradient_CK = torch.empty_like(logits_CK)
    _call("outcomes_back", [logits_CK, *others], g_CO, gradient_CK)
    return gradient_CK


def _call(name: str, fields: list[Tensor], *arguments: Tensor) -> None:
    """Call native code with `fields`, those of `NativeOutcomes` in its order, and arguments."""
    library = native.library()
    assert library is not None
    (rows, logits), dtype = fields[0].shape, fields[0].dtype
    sizes = rows, logits, fields[1].shape[1], torch.get_num_threads()
    held = [tensor.contiguous() for tensor in (*fields, *arguments)]  # as long as the call
    pointers = [native.pointer(tensor) for tensor in held]
    outcomes = native.NativeOutcomes(*sizes, *pointers[: len(fields)])
    native.function(library, name, dtype)(byref(outcomes), *pointers[len(fields) :])
