"""Compares a method's text with vanilla's, and tells rounding from bugs where they fork.

A pass over several tokens rounds differently than a pass over one, so two nearly equal candidates
can swap. Only the first difference of a turn means anything. Shapes: V vocabulary.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling, combine
from kangaroo.engine.sampling import scores as scores_of
from kangaroo.engine.tree import Tree
from kangaroo.evaluation.records import Fork
from kangaroo.models.target import TargetModel


def fork(
    lm: TargetModel,
    prompt: list[int],
    method: list[int],
    vanilla: list[int],
    sampling: Sampling,
    seed: int,
) -> Fork | None:
    """The first difference between two texts that continue `prompt`, judged by teacher forcing."""
    if method == vanilla:
        return None
    shorter = min(len(method), len(vanilla))
    position = next((i for i in range(shorter) if method[i] != vanilla[i]), shorter)
    if position == shorter:  # one goes on, although limit and EOS are the same
        return Fork(position, None, "bug")
    gap, label = judge(
        target_logits(lm, prompt + vanilla[:position]),
        method[position],
        vanilla[position],
        dtype=lm.dtype,
        sampling=sampling,
        seed=seed,
        position=len(prompt) + position,
    )
    return Fork(position, gap, label)


def judge(
    logits_V: Tensor,
    method: int,
    vanilla: int,
    dtype: torch.dtype,
    sampling: Sampling,
    seed: int,
    position: int,
) -> tuple[float | None, str]:
    """Gap and label of a fork at `position` of the whole text. It is a near-tie if rounding could
    have made either token the choice: each must win, after filters, temperature and noise, if half
    of the slack is added to its logit and taken from the other's. So both have to be among the
    best, and tokens at the edge of a top-k or top-p filter are judged fairly."""
    # How much rounding may change the difference of two logits: four steps of `dtype`, each epsilon
    # times the largest logit. Measured between passes over one and seven tokens of SmolLM2-135M: at
    # most 1.4 steps in bfloat16, and 3e-5 in float32, hence the floor. A wrong mask: several units.
    slack = max(1e-3, 4 * torch.finfo(dtype).eps * float(logits_V.abs().max()))

    def can_win(token: int, rival: int) -> bool:
        moved_V = logits_V.clone()
        moved_V[token] += slack / 2
        moved_V[rival] -= slack / 2
        scores_V = scores(moved_V, sampling, seed, position)
        return bool(scores_V[token] == scores_V.max())

    scores_V = scores(logits_V, sampling, seed, position)
    gap = float(scores_V.max() - scores_V[[method, vanilla]].min())
    tied = can_win(method, vanilla) and can_win(vanilla, method)
    return gap if math.isfinite(gap) else None, "near-tie" if tied else "bug"


def scores(logits_V: Tensor, sampling: Sampling, seed: int, position: int) -> Tensor:
    """The scores whose argmax is `sampling.pick`."""
    seed_1, position_1 = torch.tensor([[seed], [position]], device=logits_V.device)
    batch = combine([sampling])
    batch = batch.reading(batch.settings_B3.to(logits_V.device))
    return scores_of(logits_V[None, None], position_1[None], batch, seed_1)[0, 0]


@torch.no_grad()
def target_logits(lm: TargetModel, tokens: list[int]) -> Tensor:
    """float32 logits `[V]` of the token after `tokens`, computed as vanilla decoding does."""
    session = Engine(lm, Vanilla()).open(1, len(tokens) + 1, Sampling())
    session.admit(0, Request(tokens, max_new_tokens=1))
    # the last token again, alone, since prefill and decoding round differently
    last_11 = torch.tensor([tokens[-1:]], device=lm.device)
    start_B = torch.tensor([len(tokens) - 1], device=lm.device)
    meta = lm.forward_meta(Tree.chain(1, lm.device), start_B, len(tokens), session.batch.n_slots)
    meta = replace(meta, recordable=False)  # a CUDA graph would be used once
    x_BND, _ = lm.run(lm.embed(last_11), session.batch.cache, meta, range(lm.n_layers))
    return lm.logits(x_BND)[0, 0].float()
