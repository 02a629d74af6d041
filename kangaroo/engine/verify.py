"""Walk a draft by the target's own choices and keep what matches.

Shapes: B rows, N draft nodes, P = 1 + the draft's largest depth, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.engine.sampling import AnySampling, NoiseStream, Rule, perturb, pick, uniform, warp
from kangaroo.engine.tree import Draft
from kangaroo.utils.errors import ConfigError


class Verdict(NamedTuple):
    """What verification decided.

    Args:
        choice_BN: the token the target writes after each node.
        best_B: the deepest node whose whole path matched.
        count_B: accepted draft tokens, 0 up to the draft's depth.
        path_BP: nodes from the root to `best`, then `best` repeated.
    """

    choice_BN: Tensor
    best_B: Tensor
    count_B: Tensor
    path_BP: Tensor


def accept(draft: Draft, choice_BN: Tensor) -> Verdict:
    """The longest path of `draft` that the target would have written itself, by its choice after
    each node.

    Source: Leviathan et al. 2023 (section 2.3) for chains; the greedy and the matched-noise case
    walk a tree in the same way (arXiv 2408.07978).
    """
    tree = draft.tree
    steps_P = torch.arange(tree.max_depth + 1, device=choice_BN.device)
    if tree.is_chain:  # node and depth are one
        matched_BN = draft.valid_BN[:, 1:] & (draft.tokens_BN[:, 1:] == choice_BN[:, :-1])
        count_B = best_B = matched_BN.cumprod(1).sum(1)
        return Verdict(choice_BN, best_B, count_B, torch.minimum(steps_P, best_B[:, None]))
    parents_BN = tree.parents_BN.expand_as(draft.tokens_BN)
    matched_BN = draft.valid_BN & (draft.tokens_BN == choice_BN.gather(1, parents_BN))
    is_root_N = torch.arange(tree.size, device=choice_BN.device) == 0
    matched_BN = matched_BN | is_root_N  # the pending token is committed already
    alive_BN = (~tree.ancestors_BNN | matched_BN[:, None]).all(-1)
    best_B = (alive_BN * (tree.depth_BN + 1)).argmax(-1)
    depth_BN = tree.depth_BN.expand_as(draft.tokens_BN)
    count_B = depth_BN.gather(1, best_B[:, None])[:, 0]
    rows_B = torch.arange(len(best_B), device=best_B.device)
    on_path_BN = tree.ancestors_BNN.expand(len(best_B), -1, -1)[rows_B, best_B]
    order_BN = torch.where(on_path_BN, depth_BN, tree.size).argsort(dim=-1, stable=True)
    path_BP = torch.where(steps_P <= count_B[:, None], order_BN[:, : len(steps_P)], best_B[:, None])
    return Verdict(choice_BN, best_B, count_B, path_BP)


def rejection(
    draft: Draft, logits_BNV: Tensor, positions_BN: Tensor, sampling: AnySampling, seeds_B: Tensor
) -> Tensor:
    """What the target writes after each node of a chain under classic speculative sampling.

    The drafted child x of a node is kept with probability min(1, p(x) / q(x)); otherwise a token is
    drawn from the residual max(p - q, 0). Nodes without a valid child draw from p. The draws use
    independent noise, none of it the draft's. Source: Leviathan et al. 2023, algorithm 1.
    """
    if not draft.tree.is_chain or draft.probs_BNV is None:
        raise ConfigError(
            "sampling.rule=rejection needs a drafter of chains that keeps the probabilities it "
            "drew from, such as kangaroo; this one does not. sampling.rule=match takes any."
        )
    p_BNV = warp(logits_BNV, sampling).softmax(-1)
    q_BNV = torch.cat([draft.probs_BNV[:, 1:], torch.zeros_like(p_BNV[:, :1])], 1)
    child_BN = draft.tokens_BN.roll(-1, 1)
    has_child_BN = F.pad(draft.valid_BN[:, 1:], (0, 1))
    q_BNV = q_BNV * has_child_BN[..., None]
    p_child_BN = p_BNV.gather(-1, child_BN[..., None])[..., 0]
    q_child_BN = q_BNV.gather(-1, child_BN[..., None])[..., 0]
    u_BN = uniform(seeds_B, positions_BN, NoiseStream.accept, 1)[..., 0]
    keep_BN = has_child_BN & (u_BN * q_child_BN < p_child_BN)
    residual_BNV = (p_BNV - q_BNV).clamp(min=0)
    other_BN = perturb(residual_BNV.log(), seeds_B, positions_BN, NoiseStream.residual).argmax(-1)
    return torch.where(keep_BN, child_BN, other_BN)


def decide(
    draft: Draft, logits_BNV: Tensor, positions_BN: Tensor, sampling: AnySampling, seeds_B: Tensor
) -> Verdict:
    """Verify `draft` against the target's logits by the rule that `sampling` names; `positions` are
    those of the tokens after each node."""
    how = logits_BNV, positions_BN, sampling, seeds_B
    matches = sampling.rule is Rule.match or sampling.greedy or draft.tree.size == 1
    choice_BN = pick(*how) if matches else rejection(draft, *how)
    return accept(draft, choice_BN)
