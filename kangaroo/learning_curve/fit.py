"""How a measure grows with text: a power law, and what it foretells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST = 4  # points: a law of three numbers goes through any three
_POWERS = np.linspace(0.02, 1.5, 297)


@dataclass(frozen=True)
class Law:
    """`ceiling - scale * (tokens / 1e6) ** -power`: what is still wrong falls as a power of the
    text, down to what no text teaches (Hestness et al. 2017, arXiv 1712.00409, section 3).

    Args:
        error: root of the mean squared distance to the points.
    """

    ceiling: float
    scale: float
    power: float
    error: float

    def at(self, tokens: float) -> float:
        """What it foretells for so many tokens."""
        return self.ceiling - self.scale * (tokens / 1e6) ** -self.power


def fit(tokens: Sequence[int], values: Sequence[float], most: float = 1.0) -> Law | None:
    """The law nearest to some points, by least squares; None for fewer than `LEAST`.

    Args:
        most: what the measure cannot exceed.
    """
    if len(tokens) < LEAST:
        return None
    x_N, y_N = np.array(tokens, float) / 1e6, np.array(values, float)
    laws = []
    for power in _POWERS:  # for a given power the rest is linear
        part_N2 = np.stack([np.ones_like(x_N), -(x_N**-power)], 1)
        (ceiling, scale), *_ = np.linalg.lstsq(part_N2, y_N, rcond=None)
        if ceiling > most:  # then the nearest one has this ceiling
            ceiling = most
            scale = float(part_N2[:, 1] @ (y_N - most) / (part_N2[:, 1] @ part_N2[:, 1]))
        error = float(np.sqrt(np.mean((part_N2 @ np.array([ceiling, scale]) - y_N) ** 2)))
        laws.append(Law(float(ceiling), float(scale), float(power), error))
    return min(laws, key=lambda law: law.error)
