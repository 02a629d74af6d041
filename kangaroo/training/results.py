"""Metrics of adapters in training and, by teacher forcing, on held-out text.

Shapes: B rows, T tokens, S draft steps, W draft tokens, F results.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.training.distill import MEASURES, Student

STEPS = 6  # draft tokens of the held-out compression rate: the paper's gamma
METRICS = "metrics.jsonl"


def mean_metrics(prefix: str, sums_SF: Tensor) -> dict[str, float]:
    """Means per position, without draft steps that no position reaches: `<prefix>/<measure>` for
    the first draft token, `<prefix>/step2/<measure>` for the second, ..."""
    metrics = {}
    for step, (*values, positions) in enumerate(sums_SF.tolist(), 1):
        name = prefix if step == 1 else f"{prefix}/step{step}"
        for measure, value in zip(MEASURES[:-1], values, strict=True):
            if positions:
                metrics[f"{name}/{measure}"] = value / positions
    return metrics


def held_out_metrics(prefix: str, sums_SF: Tensor, accepted_W: Tensor) -> dict[str, float]:
    """Means per position of all draft steps, CTAR and the compression rate."""
    shares = [count / float(sums_SF[0, -1]) for count in accepted_W.tolist()]
    metrics = {f"{prefix}/ctar{w}": share for w, share in enumerate(shares, start=1)}
    metrics[f"{prefix}/compression_rate"] = 1 + sum(shares)  # if no round is cut (section 4.1)
    return mean_metrics(prefix, sums_SF) | metrics


def count_accepted(steps: Sequence[Student], learnt_BT: Tensor, most: int = STEPS) -> Tensor:
    """`[W]`: the number of positions from which the first 1, 2, ... draft tokens, `most` at most,
    would all be accepted in greedy decoding, if the text is the target's own."""
    counts = []
    accepted_BT = learnt_BT
    for step in range(STEPS):
        agrees_BT = torch.zeros_like(learnt_BT)
        if step < most:
            agrees_BT[learnt_BT] = steps[min(step, len(steps) - 1)].agrees_M
        accepted_BT = accepted_BT & F.pad(agrees_BT[:, step:], (0, step))
        counts.append(accepted_BT.sum())
    return torch.stack(counts)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of every step, without a last line that is still being written."""
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
