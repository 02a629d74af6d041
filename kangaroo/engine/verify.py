"""Acceptance by rejection and by blocks: texts have the target's distribution, and vary by draft.

Shapes: B rows, N draft nodes, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.engine.sampling import BatchSampling, NoiseStream, Rule, perturb, uniform, warp
from kangaroo.engine.tree import Draft


class Chances(NamedTuple):
    """The target's and the drafter's distributions after each node, p and q; and the node's child,
    which is the token drafted from q. Without a child q is 0."""

    p_BNV: Tensor
    q_BNV: Tensor
    child_BN: Tensor
    has_child_BN: Tensor

    def child(self, chances_BNV: Tensor) -> Tensor:
        """The child's probability in one of the distributions, `[B, N]`."""
        return chances_BNV.gather(-1, self.child_BN[..., None])[..., 0]


def write(
    draft: Draft, logits_BNV: Tensor, positions_BN: Tensor, sampling: BatchSampling, seeds_B: Tensor
) -> Tensor:
    """What the target writes after each node of a chain with `probs`, `[B, N]`, by the rule of
    `sampling`; `positions` are those of these tokens."""
    assert draft.tree.is_chain and draft.probs_BNV is not None
    p_BNV = warp(logits_BNV, sampling).softmax(-1)
    has_child_BN = F.pad(draft.valid_BN[:, 1:], (0, 1))
    q_BNV = F.pad(draft.probs_BNV[:, 1:], (0, 0, 0, 1))
    q_BNV = q_BNV.where(has_child_BN[..., None], 0.0)  # others may be no numbers
    chances = Chances(p_BNV, q_BNV, draft.tokens_BN.roll(-1, 1), has_child_BN)
    rule = rejection if sampling.rule is Rule.rejection else block
    return rule(chances, positions_BN, seeds_B)


def draft_seeds(seeds_B: Tensor, length_B: Tensor) -> Tensor:
    """Seeds for the draft of a round, by the length of the text when the round begins."""
    return seeds_B + ((length_B + 1) << 40)


def rejection(chances: Chances, positions_BN: Tensor, seeds_B: Tensor) -> Tensor:
    """Classic speculative sampling: the drafted child x of a node is kept with probability
    min(1, p(x) / q(x)); otherwise a token is drawn from the residual max(p - q, 0). Nodes without a
    valid child draw from p. Each draw has its own noise. Source: Leviathan et al. 2023 (arXiv
    2211.17192), algorithm 1."""
    p_BNV, q_BNV, child_BN, has_child_BN = chances
    u_BN = uniform(seeds_B, positions_BN, NoiseStream.accept, 1)[..., 0]
    keep_BN = has_child_BN & (u_BN * chances.child(q_BNV) < chances.child(p_BNV))
    residual_BNV = (p_BNV - q_BNV).clamp(min=0)
    other_BN = perturb(residual_BNV.log(), seeds_B, positions_BN, NoiseStream.residual).argmax(-1)
    return torch.where(keep_BN, child_BN, other_BN)


def block(chances: Chances, positions_BN: Tensor, seeds_B: Tensor) -> Tensor:
    """Block verification (arXiv 2403.10444, algorithm 2). A node's weight w is min(1, w' p(x) /
    q(x)), with its parent's weight w' and its own token x; the root's is 1. A node passes its test
    with chance s / (s + 1 - w), where s is the sum of its residual max(w p - q, 0). The last node
    that passes ends the accepted part, and the next token is drawn from its residual. Nodes after
    it draw from p; where that gives the drafted token, the walk goes on.

    What is accepted depends on later tokens and tests, so each round has noise of its own: tests by
    the round's first position, drafts by `draft_seeds`."""
    p_BNV, q_BNV, child_BN, has_child_BN = chances
    ratios_BN = chances.child(p_BNV) / chances.child(q_BNV)
    weights = [torch.ones_like(ratios_BN[:, 0])]
    for ratio_B in ratios_BN[:, :-1].unbind(1):  # those beyond the chain's end do not matter
        weights.append((weights[-1] * ratio_B).nan_to_num(0.0).clamp(max=1))
    w_BN = torch.stack(weights, 1)
    residual_BNV = (w_BN[..., None] * p_BNV - q_BNV).clamp(min=0)
    sum_BN = residual_BNV.sum(-1)
    # 0 / 0 where p equals q: then the next token passes, or this is the last one
    passing_BN = (sum_BN / (sum_BN + 1 - w_BN)).nan_to_num(1.0)
    u_BN = uniform(seeds_B, positions_BN[:, :1], NoiseStream.accept, w_BN.shape[1])[:, 0]
    node_N = torch.arange(w_BN.shape[1], device=w_BN.device)
    is_child_BN = has_child_BN.roll(1, 1)  # False at the root, which needs no test
    last_B1 = (node_N * (is_child_BN & (u_BN <= passing_BN))).amax(1, keepdim=True)
    drawn_from_BNV = torch.where((node_N > last_B1)[..., None], p_BNV, residual_BNV)
    other_BN = perturb(drawn_from_BNV.log(), seeds_B, positions_BN, NoiseStream.residual).argmax(-1)
    return torch.where(node_N < last_B1, child_BN, other_BN)
