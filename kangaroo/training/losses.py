"""What an adapter is trained on, as a function of two distributions.

Shapes: C positions, K draft vocabulary.
"""

from enum import Enum

import torch
from torch import Tensor

_DECAY = 3.0  # eta of the hybrid: how fast it leaves KL as acceptance grows


class Loss(Enum):
    """How far the adapter's distribution q is from the target's p.

    `cross_entropy`: `-sum p log q` (Kangaroo, arXiv 2404.18911, section 3.2).
    `kl`: `sum p log(p / q)`, the same gradient, but 0 where the two agree.
    `total_variation`: `1 - alpha`, with `alpha = sum min(p, q)` the chance that a sampled draft
        token is accepted (Leviathan et al. 2023, corollary 3.6).
    `lk`: `-log alpha`.
    `hybrid`: `w kl + (1 - w) (1 - alpha)`, `w = exp(-3 alpha)`: KL where the adapter is far off and
        total variation, whose gradient vanishes there, where it is near.
    """

    cross_entropy = "cross_entropy"
    kl = "kl"
    total_variation = "total_variation"
    lk = "lk"
    hybrid = "hybrid"


def overlap(p_CK: Tensor, log_q_CK: Tensor) -> Tensor:
    """`alpha = sum min(p, q)` of each position."""
    return torch.minimum(p_CK, log_q_CK.exp()).sum(-1)


def divergence(loss: Loss, p_CK: Tensor, log_q_CK: Tensor) -> Tensor:
    """The loss at each position, in nats or as a probability.

    Args:
        p_CK: the target's probabilities of the draft vocabulary's tokens; what is missing to 1 lies
            outside of it. Where one outcome stands for many tokens (`StoredDistributions`), `alpha`
            takes these as if they overlapped fully.
    """
    if loss is Loss.cross_entropy:
        return -(p_CK * log_q_CK).sum(-1)
    if loss is Loss.kl:
        return torch.xlogy(p_CK, p_CK).sum(-1) - (p_CK * log_q_CK).sum(-1)
    alpha_C = overlap(p_CK, log_q_CK)
    if loss is Loss.total_variation:
        return 1 - alpha_C
    if loss is Loss.lk:
        return -alpha_C.clamp(min=1e-6).log()  # finite where nothing overlaps in float32
    weight_C = (-_DECAY * alpha_C.detach()).exp()
    kl_C = divergence(Loss.kl, p_CK, log_q_CK)
    return weight_C * kl_C + (1 - weight_C) * (1 - alpha_C)
