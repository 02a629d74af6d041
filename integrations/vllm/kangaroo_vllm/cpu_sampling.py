"""Fixes sampled speculative decoding in vLLM 0.32 and 0.33 without Triton.

The kernel that expands a request's sampling options to its tokens converts its output to int64 and
fills only the converted copy, so that the temperature, top-k and top-p of drafted positions are
uninitialized memory. And top-k fails in a step that verifies no draft, such as the first.
"""

import torch
from torch import Tensor
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


def expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value for each of its tokens."""
    counts = cu_num_tokens.long().diff(prepend=cu_num_tokens.new_zeros(1).long())
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(values.to(output.dtype).repeat_interleave(counts))


def filtered(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """vLLM's `apply_top_k_top_p`, unless there are no logits."""
    return apply_top_k_top_p(logits, k, p) if len(logits) else logits


def repair() -> None:
    """Install both fixes; a second call changes nothing."""
    register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": expand})
    rejection_sampler.apply_top_k_top_p = filtered
