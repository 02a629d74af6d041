"""The distillation loss, in chunks, so that full-vocabulary logits never stand whole in memory.

Shapes: M assistant positions of a batch, C of them in a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kangaroo.model import LM


@dataclass
class Scores:
    """Sums over positions, so that batches of different size add up.

    Args:
        loss: soft cross-entropy in nats.
        agreement: positions where adapter and target have the same likeliest token.
        acceptance: sum of min(p, q), the chance that a sampled draft token is accepted.
        positions: how many assistant positions were scored.
    """

    loss: float = 0.0
    agreement: float = 0.0
    acceptance: float = 0.0
    positions: int = 0

    def __add__(self, other: Scores) -> Scores:
        return Scores(
            self.loss + other.loss,
            self.agreement + other.agreement,
            self.acceptance + other.acceptance,
            self.positions + other.positions,
        )

    def means(self) -> dict[str, float]:
        """Per position, under the names used in logs and provenance."""
        return {
            "loss": self.loss / self.positions,
            "agreement": self.agreement / self.positions,
            "expected_acceptance": self.acceptance / self.positions,
        }


def soft_cross_entropy(p_CV: Tensor, log_q_CV: Tensor) -> Tensor:
    """`-sum p log q` of each position (Kangaroo, arXiv 2404.18911, section 3.2)."""
    return -(p_CV * log_q_CV).sum(-1)


def distill(
    lm: LM, teacher_MD: Tensor, student_MD: Tensor, chunk_size: int, backward: bool
) -> tuple[Scores, Tensor]:
    """Score the adapter against the target at every position and sum the loss.

    Args:
        teacher_MD: the target's own normed final states.
        student_MD: the adapter's normed states.
        chunk_size: positions whose logits exist at a time.
        backward: also compute the gradient.

    Returns the scores and the gradient of the summed loss with respect to `student_MD` (zeros
    without `backward`): the caller passes it on to the adapter, once for all chunks.
    """
    scores = Scores()
    gradient_MD = torch.zeros_like(student_MD, dtype=torch.float32)
    for start in range(0, len(student_MD), chunk_size):
        part = slice(start, start + chunk_size)
        with torch.no_grad():
            p_CV = lm.head(teacher_MD[part]).float().softmax(-1)
        with torch.set_grad_enabled(backward):
            student_CD = student_MD[part].detach().to(lm.dtype).requires_grad_(backward)
            log_q_CV = lm.head(student_CD).float().log_softmax(-1)
            loss = soft_cross_entropy(p_CV, log_q_CV).sum()
        if backward:
            (gradient_MD[part],) = torch.autograd.grad(loss, student_CD)
        log_q_CV = log_q_CV.detach()
        scores += Scores(
            loss=loss.item(),
            agreement=(p_CV.argmax(-1) == log_q_CV.argmax(-1)).sum().item(),
            acceptance=torch.minimum(p_CV, log_q_CV.exp_()).sum().item(),
            positions=len(p_CV),
        )
    return scores, gradient_MD
