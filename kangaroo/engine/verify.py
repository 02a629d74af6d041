"""Classic speculative sampling: the other rule of acceptance, by which a text's distribution is the
target's, but its tokens depend on the drafts.

Shapes: B rows, N draft nodes, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.engine.sampling import AnySampling, NoiseStream, perturb, uniform, warp
from kangaroo.engine.tree import Draft
from kangaroo.utils.errors import ConfigError


def rejection(
    draft: Draft, logits_BNV: Tensor, positions_BN: Tensor, sampling: AnySampling, seeds_B: Tensor
) -> Tensor:
    """What the target writes after each node of a chain, `[B, N]`.

    The drafted child x of a node is kept with probability min(1, p(x) / q(x)); otherwise a token is
    drawn from the residual max(p - q, 0). Nodes without a valid child draw from p. The draws use
    independent noise, none of it the draft's. Source: Leviathan et al. 2023, algorithm 1.

    Errors: `ConfigError` for a draft that is no chain, or does not say what it was drawn from.
    """
    if not draft.tree.is_chain or draft.probs_BNV is None:
        raise ConfigError(
            f"sampling.rule={sampling.rule.value} needs a drafter of chains that keeps the "
            "probabilities it drew from, such as kangaroo; this one does not. sampling.rule=match "
            "takes any."
        )
    p_BNV = warp(logits_BNV, sampling).softmax(-1)
    has_child_BN, child_BN = F.pad(draft.valid_BN[:, 1:], (0, 1)), draft.tokens_BN.roll(-1, 1)
    q_BNV = F.pad(draft.probs_BNV[:, 1:], (0, 0, 0, 1)) * has_child_BN[..., None]
    p_BN, q_BN = (x.gather(-1, child_BN[..., None])[..., 0] for x in (p_BNV, q_BNV))
    u_BN = uniform(seeds_B, positions_BN, NoiseStream.accept, 1)[..., 0]
    keep_BN = has_child_BN & (u_BN * q_BN < p_BN)
    residual_BNV = (p_BNV - q_BNV).clamp(min=0)
    other_BN = perturb(residual_BNV.log(), seeds_B, positions_BN, NoiseStream.residual).argmax(-1)
    return torch.where(keep_BN, child_BN, other_BN)
