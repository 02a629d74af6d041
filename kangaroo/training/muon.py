"""Muon, as PyTorch has it, in a number format that the device multiplies fast."""

from __future__ import annotations

import torch
from torch import Tensor

from kangaroo.cpu.native import torch_multiplies

MOMENTUM = "momentum_buffer"  # in an optimizer's state
LIKE_ADAMW = 0.2  # the root mean square of AdamW's steps (arXiv 2502.16982, section 2.2)


class Muon(torch.optim.Muon):
    """Moves matrices by steps with singular values near 1 (Jordan et al. 2024).

    PyTorch's own orthogonalises in bfloat16 whatever the device. On a processor without fast
    products of bfloat16 that takes ten times as long as all else in a step of training, so there
    float32 is taken. A learning rate means what it means to AdamW (`match_rms_adamw`).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move all that has a gradient; nothing is evaluated anew, so there is no closure."""
        pairs = [(weight, group) for group in self.param_groups for weight in group["params"]]
        for weight_MN, group in pairs:
            gradient_MN, state = weight_MN.grad, self.state[weight_MN]
            if gradient_MN is None:
                continue
            if MOMENTUM not in state:
                state[MOMENTUM] = torch.zeros_like(gradient_MN)
            state[MOMENTUM].lerp_(gradient_MN, 1 - group["momentum"])
            update_MN = gradient_MN.lerp(state[MOMENTUM], group["momentum"])
            options = group["ns_coefficients"], group["ns_steps"], group["eps"]
            weight_MN.mul_(1 - group["lr"] * group["weight_decay"])
            rate = group["lr"] * LIKE_ADAMW * max(weight_MN.shape) ** 0.5
            weight_MN.add_(orthogonal(update_MN, *options), alpha=-rate)


def orthogonal(
    matrix_MN: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The matrix with its singular values brought near 1, by Newton and Schulz's iteration."""
    is_fast = matrix_MN.device.type != "cpu" or torch_multiplies(torch.bfloat16)
    is_tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x_MN = matrix_MN.to(torch.bfloat16 if is_fast else torch.float32)
    x_MN = x_MN.T if is_tall else x_MN  # the smaller side first
    x_MN = x_MN / x_MN.norm().clamp(min=eps)
    a, b, c = coefficients
    for _ in range(steps):
        square_MM = x_MN @ x_MN.T
        polynomial_MM = torch.addmm(square_MM, square_MM, square_MM, beta=b, alpha=c)
        x_MN = torch.addmm(x_MN, polynomial_MM, x_MN, beta=a)
    return x_MN.T.contiguous() if is_tall else x_MN
