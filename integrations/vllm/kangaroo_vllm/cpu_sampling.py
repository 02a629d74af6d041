"""A repair of vLLM 0.32.0 without Triton: speculation at a temperature above 0.

There `_expand_kernel_impl` converts its output to int64 and fills the converted copy, so that
temperature, top-k and top-p of the drafted positions are read from memory that nobody wrote.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write each request's value once for each of its tokens."""
    counts = cu_num_tokens.long().diff(prepend=cu_num_tokens.new_zeros(1).long())
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(values.to(output.dtype).repeat_interleave(counts))


def repair() -> None:
    """Put `expand` in its place."""
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand
