"""Kangaroo's trees, recorded level by level from every position of a text, and their rounds again.

A tree's levels follow from the one before, whatever the threshold; how many there are, and what is
left of them after pruning, follows from the scores. So one record serves every setting but `top_k`.

Shapes: P positions where a round can begin, S levels, L nodes of a level, C candidates of each, N
nodes of a whole tree, the root first, D hidden size, K draft vocabulary, E occupied slots.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kangaroo.drafters.kangaroo_tree import KangarooTree, kept, take
from kangaroo.engine.batch import Batch
from kangaroo.evaluation.tune.replay import Chains, check_steps, coming
from kangaroo.evaluation.tune.trace import Grown, Turn
from kangaroo.models.target import LM


def grow(
    drafter: KangarooTree, lm: LM, batch: Batch, first: int, states_PD: Tensor
) -> tuple[np.ndarray, ...]:
    """The trees of neighbouring positions: the arrays of `Grown`.

    Args:
        first: the first of these positions, in the cache.
        states_PD: what the drafter has there.
    """
    count, steps, width, length = len(states_PD), drafter.steps, drafter.top_k, batch.lengths[0]
    base_P = first + torch.arange(count, device=lm.device)
    room = steps * width
    extent = lm.extent(batch.n_slots, length + count * room)
    hidden_PLE = (torch.arange(extent, device=lm.device) > base_P[:, None])[:, None]
    slots_PL = length + torch.arange(count * room, device=lm.device).view(count, room)
    score_PL, adapted_PLD = torch.ones(count, 1, device=lm.device), states_PD[:, None]
    levels = []
    for step in range(steps):
        logits_MK = drafter.head(adapted_PLD.flatten(0, 1)).float()
        logits_PLK = logits_MK.unflatten(0, adapted_PLD.shape[:2])
        choice_PLC = drafter.head.token_of(logits_PLK.topk(width).indices)
        score_PLC = score_PL[..., None] * logits_PLK.softmax(-1).topk(width).values
        score_PL, best_PL = score_PLC.flatten(1).topk(width)
        parent_PL = best_PL // width
        token_PL = choice_PLC.flatten(1).gather(1, best_PL)
        levels.append((token_PL, parent_PL, score_PL))
        if step + 1 == steps:
            break
        own_PL = slots_PL[:, step * width : (step + 1) * width]
        hidden_PLE = take(hidden_PLE, parent_PL).scatter(2, own_PL[..., None], False)
        at_PL = (base_P + 1 + step)[:, None].expand_as(own_PL)
        block = lm.block_of(
            own_PL.reshape(1, -1),
            at_PL.reshape(1, -1),
            hidden_PLE.flatten(0, 1)[None],
            batch.n_slots,
        )
        block = replace(block, recordable=False)
        x_1MD = lm.embed(token_PL.reshape(1, -1))
        f_1MD, _ = lm.run(x_1MD, batch.cache, block, drafter.shallow)
        at, deep_1MD = block.to(f_1MD.device), None
        if drafter.reads_deep:
            deep_1MD = take(adapted_PLD, parent_PL).flatten(0, 1)[None]
        adapted_1MD = drafter.adapter(f_1MD, deep_1MD, at, drafter.cache.at(at))
        adapted_PLD = adapted_1MD[0].unflatten(0, own_PL.shape)
    kinds = (np.int32, np.int32, np.float32)
    return tuple(
        torch.stack(part, 1).cpu().numpy().astype(kind)
        for part, kind in zip(zip(*levels, strict=True), kinds, strict=True)
    )


def trees(
    turn: Turn,
    grown: Grown,
    threshold: float,
    steps: int,
    nodes: int,
    least: float | None = None,
) -> Chains:
    """What Kangaroo drafts as trees: exactly as `drafter=kangaroo_tree` with these settings and the
    `top_k` of the trace.

    Errors: `ConfigError` where the trace has no tree of so many levels.
    """
    check_steps(grown, steps)
    tokens_PSL, parents_PSL, scores_PSL = (
        part[:, :steps] for part in (grown.tokens_PSL, grown.parents_PSL, grown.scores_PSL)
    )
    unsure_PS = scores_PSL.max(2) <= np.float32(threshold)
    unsure_PS[:, -1:] = True
    levels_P = unsure_PS.argmax(1) + 1
    keep_PSL = pruned(parents_PSL, scores_PSL, levels_P, nodes, least)
    right_PSL = keep_PSL & (tokens_PSL == coming(turn, steps)[: len(tokens_PSL), :, None])
    for step in range(1, steps):  # a node is right if its parent is
        right_PSL[:, step] &= np.take_along_axis(right_PSL[:, step - 1], parents_PSL[:, step], 1)
    return Chains(keep_PSL.sum((1, 2)), right_PSL.any(2).sum(1), levels_P)


def pruned(
    parents_PSL: np.ndarray,
    scores_PSL: np.ndarray,
    levels_P: np.ndarray,
    nodes: int,
    least: float | None,
) -> np.ndarray:
    """Which nodes of the first levels are verified, `[P, S, L]`; see `kept`."""
    count, steps, width = parents_PSL.shape
    first_S = 1 + width * (np.arange(steps) - 1)  # node of each level's parents that comes first
    numbers_PSL = parents_PSL + first_S[:, None]
    numbers_PSL[:, 0] = 0  # the root
    valid_PS = np.arange(steps) < levels_P[:, None]
    valid_PSL = np.repeat(valid_PS[..., None], width, 2)

    def nodes_of(part_PSL: np.ndarray, root: float) -> Tensor:
        flat = part_PSL.reshape(count, steps * width)
        return torch.from_numpy(np.concatenate([np.full_like(flat[:, :1], root), flat], 1))

    score_PN, parent_PN = nodes_of(scores_PSL, 1.0), nodes_of(numbers_PSL, 0).long()
    keep_PN = kept(score_PN, parent_PN, nodes_of(valid_PSL, True), nodes, least)
    return keep_PN[:, 1:].numpy().reshape(count, steps, width)
