"""What `kangaroo/training/distill.py` computes of stored distributions, in native code.

Shapes: C positions of a chunk, K draft vocabulary, J stored tokens, O outcomes.
"""

from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from kangaroo.cpu import native, structs


def takes(logits_CK: Tensor) -> bool:
    """Whether native code takes logits on this device and in this format."""
    on_cpu = logits_CK.device.type == "cpu" and logits_CK.dtype in native.DTYPES
    return on_cpu and native.library() is not None


class Outcomes(torch.autograd.Function):
    """`distill.outcomes`, with the gradient of the logits in one pass. With g the gradients of the
    outcomes, s their sum and q the probabilities, the gradient is `g - s q` for a token among the
    outcomes, and `(g_rest / q_rest - s) q` for any other."""

    @staticmethod
    def forward(
        ctx: Any, logits_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        count, tokens = index_CJ.shape
        log_q_CO, largest_C, rest_C = (torch.empty(n) for n in ((count, tokens + 1), count, count))
        best_C = torch.empty(count, dtype=torch.long)
        fields = logits_CK, index_CJ, inside_CJ, log_q_CO, largest_C, rest_C
        _call("find_outcomes", [*fields, best_C])
        ctx.save_for_backward(*fields)
        ctx.mark_non_differentiable(best_C)
        return log_q_CO, best_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        fields = list(ctx.saved_tensors)
        gradient_CK = torch.empty_like(fields[0])
        _call("outcomes_back", fields, gradients[0], gradient_CK)
        return gradient_CK, None, None


def _call(name: str, fields: list[Tensor], *arguments: Tensor) -> None:
    """Call native code with the `fields` of `structs.Outcomes`, in their order, and arguments."""
    library = native.library()
    assert library is not None
    rows, logits = fields[0].shape
    tensors = [tensor.contiguous() for tensor in (*fields, *arguments)]  # kept alive
    pointers = [native.pointer(tensor) for tensor in tensors]
    sizes = (rows, logits, fields[1].shape[1], torch.get_num_threads())
    structure = structs.Outcomes(*sizes, *pointers[: len(fields)])
    native.function(library, name, fields[0].dtype)(byref(structure), *pointers[len(fields) :])
