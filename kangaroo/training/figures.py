"""What training reports of every adapter, by name.

Shapes: B rows, T tokens, M assistant positions, W draft tokens, F figures.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.training.distill import FIGURES, Graded
from kangaroo.training.recipe import Trainee

STEPS = 6  # draft tokens of the held-out compression rate: the paper's gamma


def sums(grades: Sequence[Sequence[Graded]]) -> Tensor:
    """`[all steps of all adapters, F]`, so that micro-batches and processes add up."""
    return torch.stack([grade.sums_F for own in grades for grade in own]).cpu()


def named(prefix: str, names: Sequence[str], sums_SF: Tensor) -> dict[str, float]:
    """Means per position under `<prefix>/<name>/<figure>`."""
    count = FIGURES.index("positions")
    return {
        f"{prefix}/{name}/{figure}": value / row[count]
        for name, row in zip(names, sums_SF.tolist(), strict=True)
        for figure, value in zip(FIGURES, row, strict=True)
        if figure != "positions"
    }


def step_names(trained: Sequence[Trainee]) -> list[str]:
    """A name for each row of `sums` in training."""
    names = []
    for trainee in trained:
        names.append(trainee.name)
        names += [f"{trainee.name}/step{k}" for k in range(2, trainee.recipe.draft_steps + 1)]
        if trainee.recipe.on_policy:
            names.append(f"{trainee.name}/own_token")
    return names


def accepted(own: Sequence[Graded], wanted_BT: Tensor) -> Tensor:
    """`[W]`: from how many positions the first 1, 2, ... draft tokens would all be accepted.

    Greedy, along texts that the target wrote: had a draft begun at every position, each of its
    tokens would be judged as the grades of its step say.
    """
    counts = []
    alive_BT = wanted_BT
    for step in range(STEPS):
        agrees_BT = torch.zeros_like(wanted_BT)
        agrees_BT[wanted_BT] = own[min(step, len(own) - 1)].agrees_M
        alive_BT = alive_BT & F.pad(agrees_BT[:, step:], (0, step))
        counts.append(alive_BT.sum())
    return torch.stack(counts)


def compression(name: str, accepted_W: Tensor, positions: float) -> dict[str, float]:
    """CTAR(1), CTAR(2), ... and the compression rate `1 + sum CTAR` of the paper, section 4.1."""
    ctar = [count / positions for count in accepted_W.tolist()]
    figures = {f"held_out/{name}/ctar{w}": share for w, share in enumerate(ctar, start=1)}
    return figures | {f"held_out/{name}/compression_rate": 1 + sum(ctar)}
