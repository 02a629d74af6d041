"""What training reports, of every adapter and besides, by name.

Shapes: B rows, T tokens, M assistant positions, W draft tokens, F results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.evaluation.metrics import rate_of_ctar
from kangaroo.training.distill import MEASURES, Student
from kangaroo.training.recipe import Trainee

STEPS = 6  # draft tokens of the held-out compression rate: the paper's gamma
POSITIONS = MEASURES.index("positions")


def sums(students: Sequence[Sequence[Student]]) -> Tensor:
    """`[all steps of all adapters, F]`, so that micro-batches and processes add up."""
    return torch.stack([student.sums_F for steps in students for student in steps])


def named(
    prefix: str, trained: Sequence[Trainee], counts: Sequence[int], sums_SF: Tensor
) -> dict[str, float]:
    """Means per position, where there was one: `<prefix>/<adapter>/<result>` for the first draft
    token, `<prefix>/<adapter>/step2/<result>` for the second, ...; `counts` are the draft steps of
    each adapter."""
    names = [
        trainee.name if step == 1 else f"{trainee.name}/step{step}"
        for trainee, count in zip(trained, counts, strict=True)
        for step in range(1, count + 1)
    ]
    return {
        f"{prefix}/{name}/{measure}": value / row[POSITIONS]
        for name, row in zip(names, sums_SF.tolist(), strict=True)
        for measure, value in zip(MEASURES, row, strict=True)
        if measure != "positions" and row[POSITIONS]  # no answer may reach a late step
    }


def held_out(trained: Sequence[Trainee], sums_SF: Tensor, accepted_AW: Tensor) -> dict[str, float]:
    """Means per position of all draft steps, and of each adapter CTAR and the compression rate."""
    counts = [trainee.recipe.architecture.graded_steps(STEPS) for trainee in trained]
    metrics = named("held_out", trained, counts, sums_SF)
    of_each = zip(trained, sums_SF.split(counts), accepted_AW.tolist(), strict=True)
    for trainee, steps_SF, accepted_W in of_each:
        ctar = [count / float(steps_SF[0, POSITIONS]) for count in accepted_W]
        metrics |= compression(f"held_out/{trainee.name}", ctar, rate_of_ctar(ctar))
    return metrics


def accepted(steps: Sequence[Student], wanted_BT: Tensor, most: int = STEPS) -> Tensor:
    """`[W]`: from how many positions the first 1, 2, ... draft tokens, `most` at most, would all be
    accepted: greedy, had a draft begun at every position of texts that the target wrote."""
    counts, alive_BT = [], wanted_BT
    for step in range(STEPS):
        agrees_BT = torch.zeros_like(wanted_BT)
        if step < most:
            agrees_BT[wanted_BT] = steps[min(step, len(steps) - 1)].agrees_M
        alive_BT = alive_BT & F.pad(agrees_BT[:, step:], (0, step))
        counts.append(alive_BT.sum())
    return torch.stack(counts)


def compression(prefix: str, ctar: Sequence[float], rate: float) -> dict[str, float]:
    """CTAR(1), CTAR(2), ... and the compression rate, by name."""
    shares = {f"{prefix}/ctar{w}": share for w, share in enumerate(ctar, start=1)}
    return shares | {f"{prefix}/compression_rate": rate}


def below(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """Those whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
