"""A student's distribution as one over few outcomes: some tokens, and all others together.

Shapes: C positions, J tokens of each, O = J + 1 outcomes, K draft vocabulary.
"""

from __future__ import annotations

import math
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from kangaroo.cpu import native

LEAST = 1e-30  # a probability whose logarithm and reciprocal float32 can still hold


def outcomes(logits_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[C, O]` of some tokens and of all others together, in float32, any for
    those that are not inside; and the argmax `[C]`.

    On a CPU by native code (`cpp/outcomes.h`), without a copy of the logits in float32.
    """
    on_cpu = logits_CK.device.type == "cpu" and logits_CK.dtype in native.DTYPES
    if on_cpu and native.library() is not None:
        return NativeOutcomes.apply(logits_CK, index_CJ, inside_CJ)
    logits_CK, best_C = logits_CK.float(), logits_CK.argmax(-1)
    total_C1 = logits_CK.logsumexp(-1, keepdim=True)
    rows_C1 = torch.arange(len(logits_CK), device=logits_CK.device)[:, None]
    places = rows_C1.expand_as(index_CJ)[inside_CJ], index_CJ[inside_CJ]
    others_CK = logits_CK.index_put(places, logits_CK.new_tensor(-torch.inf))
    rest_C1 = others_CK.logsumexp(-1, keepdim=True) - total_C1
    log_q_CJ = logits_CK.gather(1, index_CJ) - total_C1
    return torch.cat([log_q_CJ, rest_C1.clamp(min=math.log(LEAST))], -1), best_C


class NativeOutcomes(torch.autograd.Function):
    """`outcomes` by native code, which writes down the gradient of the logits at once.

    With g of the outcomes, s its sum and q the probabilities, a token among the outcomes has
    `g - s q`, any other `(g_rest / q_rest - s) q`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        count, tokens = index_CJ.shape
        log_q_CO, largest_C, rest_C = (torch.empty(n) for n in ((count, tokens + 1), count, count))
        best_C = torch.empty(count, dtype=torch.long)
        known = logits_CK, index_CJ, inside_CJ, log_q_CO, largest_C, rest_C
        _call("find_outcomes", [*known, best_C])
        ctx.save_for_backward(*known)
        ctx.mark_non_differentiable(best_C)
        return log_q_CO, best_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        known = list(ctx.saved_tensors)
        gradient_CK = torch.empty_like(known[0])
        _call("outcomes_back", known, gradients[0], gradient_CK)
        return gradient_CK, None, None


def _call(name: str, fields: list[Tensor], *arguments: Tensor) -> None:
    """Call native code with the `fields` of its `NativeOutcomes`, in their order, and arguments."""
    library = native.library()
    assert library is not None
    (rows, logits), dtype = fields[0].shape, fields[0].dtype
    sizes = rows, logits, fields[1].shape[1], torch.get_num_threads()
    held = [tensor.contiguous() for tensor in (*fields, *arguments)]  # as long as the call
    pointers = [native.pointer(tensor) for tensor in held]
    structure = native.NativeOutcomes(*sizes, *pointers[: len(fields)])
    native.function(library, name, dtype)(byref(structure), *pointers[len(fields) :])
