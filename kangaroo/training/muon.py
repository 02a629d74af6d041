"""Muon, as PyTorch has it, in a number format that the device multiplies fast, and shared out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kangaroo.cpu.native import torch_multiplies
from kangaroo.utils.ranks import Ranks

MOMENTUM = "momentum_buffer"  # in an optimizer's state
LIKE_ADAMW = 0.2  # the root mean square of AdamW's steps (arXiv 2502.16982, section 2.2)


class Muon(torch.optim.Muon):
    """Moves matrices by steps with singular values near 1 (Jordan et al. 2024).

    PyTorch's own orthogonalises in bfloat16 whatever the device. On a processor without fast
    products of bfloat16 that takes ten times as long as all else in a step of training, so there
    float32 is taken. A learning rate means what it means to AdamW (`match_rms_adamw`).

    Args:
        ranks: processes with the same weights and gradients. Each makes the steps of some matrices
            and gets those of the others, which are the same numbers.
    """

    def __init__(self, params: Any, ranks: Ranks | None = None, **options: Any):
        super().__init__(params, **options)
        self.ranks = ranks or Ranks()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move all that has a gradient; nothing is evaluated anew, so there is no closure."""
        pairs = [(weight, group) for group in self.param_groups for weight in group["params"]]
        moved = [(weight, group) for weight, group in pairs if weight.grad is not None]
        moved.sort(key=lambda pair: -pair[0].numel())  # so that all have as much to do
        steps = [
            self._step_of(weight, group, i % self.ranks.world == self.ranks.rank)
            for i, (weight, group) in enumerate(moved)
        ]
        for i, ((weight, group), step) in enumerate(zip(moved, steps, strict=True)):
            self.ranks.copy_from(i % self.ranks.world, step)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(step, alpha=-group["lr"] * LIKE_ADAMW * max(weight.shape) ** 0.5)

    def _step_of(self, weight_MN: Tensor, group: dict[str, Any], is_mine: bool) -> Tensor:
        """The direction in which a matrix moves; if it is another process's, room for it."""
        gradient_MN, state = weight_MN.grad, self.state[weight_MN]
        assert gradient_MN is not None
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(gradient_MN)
        state[MOMENTUM].lerp_(gradient_MN, 1 - group["momentum"])
        if not is_mine:
            return torch.empty_like(weight_MN, dtype=fast_format(weight_MN))
        update_MN = gradient_MN.lerp(state[MOMENTUM], group["momentum"])
        return orthogonal(update_MN, group["ns_coefficients"], group["ns_steps"], group["eps"])


def fast_format(matrix_MN: Tensor) -> torch.dtype:
    """The format that its device multiplies fast."""
    is_fast = matrix_MN.device.type != "cpu" or torch_multiplies(torch.bfloat16)
    return torch.bfloat16 if is_fast else torch.float32


def orthogonal(
    matrix_MN: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The matrix with its singular values brought near 1, by Newton and Schulz's iteration."""
    is_tall = matrix_MN.shape[0] > matrix_MN.shape[1]
    x_MN = matrix_MN.to(fast_format(matrix_MN))
    x_MN = x_MN.T if is_tall else x_MN  # the smaller side first
    x_MN = x_MN / x_MN.norm().clamp(min=eps)
    a, b, c = coefficients
    for _ in range(steps):
        square_MM = x_MN @ x_MN.T
        polynomial_MM = torch.addmm(square_MM, square_MM, square_MM, beta=b, alpha=c)
        x_MN = torch.addmm(x_MN, polynomial_MM, x_MN, beta=a)
    return x_MN.T.contiguous() if is_tall else x_MN
