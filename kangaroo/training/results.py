"""What training reports, of every adapter and besides, by name.

Shapes: B rows, T tokens, M assistant positions, W draft tokens, F results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.training.distill import MEASURES, Graded
from kangaroo.training.recipe import Trainee

STEPS = 6  # draft tokens of the held-out compression rate: the paper's gamma


def sums(grades: Sequence[Sequence[Graded]]) -> Tensor:
    """`[all steps of all adapters, F]`, so that micro-batches and processes add up."""
    return torch.stack([grade.sums_F for own in grades for grade in own])


def named(prefix: str, names: Sequence[str], sums_SF: Tensor) -> dict[str, float]:
    """Means per position under `<prefix>/<name>/<result>`, where there was a position."""
    count = MEASURES.index("positions")
    return {
        f"{prefix}/{name}/{measure}": value / row[count]
        for name, row in zip(names, sums_SF.tolist(), strict=True)
        for measure, value in zip(MEASURES, row, strict=True)
        if measure != "positions" and row[count]  # no answer may be long enough for a late step
    }


def draft_step_names(name: str, count: int) -> list[str]:
    """`<name>` for the first draft token, `<name>/step2` for the second, ..."""
    return [name] + [f"{name}/step{k}" for k in range(2, count + 1)]


def step_names(trained: Sequence[Trainee]) -> list[str]:
    """A name for each row of `sums` in training."""
    names = []
    for trainee in trained:
        names += draft_step_names(trainee.name, trainee.recipe.steps)
    return names


def held_out(trained: Sequence[Trainee], sums_SF: Tensor, accepted_AW: Tensor) -> dict[str, float]:
    """Means per position, also for the later draft tokens of fused adapters, CTAR, and with it the
    compression rate `1 + sum CTAR` of the paper, section 4.1.

    Args:
        sums_SF: of all draft steps of all adapters.
        accepted_AW: of each adapter, see `accepted`.
    """
    counts = [trainee.recipe.architecture.graded_steps(STEPS) for trainee in trained]
    names = [
        name
        for trainee, count in zip(trained, counts, strict=True)
        for name in draft_step_names(trainee.name, count)
    ]
    metrics = named("held_out", names, sums_SF)
    for trainee, own_SF, accepted_W in zip(
        trained, sums_SF.split(counts), accepted_AW, strict=True
    ):
        positions = float(own_SF[0, MEASURES.index("positions")])
        ctar = [count / positions for count in accepted_W.tolist()]
        metrics |= compression(f"held_out/{trainee.name}", ctar, 1 + sum(ctar))
    return metrics


def accepted(own: Sequence[Graded], wanted_BT: Tensor, most: int = STEPS) -> Tensor:
    """`[W]`: from how many positions the first 1, 2, ... draft tokens would all be accepted.

    Greedy, along texts that the target wrote: had a draft begun at every position, each of its
    tokens would be judged as the grades of its step say.

    Args:
        most: a draft has no more tokens than this.
    """
    counts = []
    alive_BT = wanted_BT
    for step in range(STEPS):
        agrees_BT = torch.zeros_like(wanted_BT)
        if step < most:
            agrees_BT[wanted_BT] = own[min(step, len(own) - 1)].agrees_M
        alive_BT = alive_BT & F.pad(agrees_BT[:, step:], (0, step))
        counts.append(alive_BT.sum())
    return torch.stack(counts)


def compression(prefix: str, ctar: Sequence[float], rate: float) -> dict[str, float]:
    """CTAR(1), CTAR(2), ... and the compression rate, by name."""
    found = {f"{prefix}/ctar{w}": share for w, share in enumerate(ctar, start=1)}
    return found | {f"{prefix}/compression_rate": rate}
