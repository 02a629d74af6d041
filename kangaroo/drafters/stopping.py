"""When to stop drafting: at a confidence, or where one more token is not worth its time.

Shapes: B rows, K draft vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

PRIOR = 0.5  # of a text's first rounds: acceptance of a draft token
MEMORY = 32  # rounds or draft tokens after which an observation counts for a third


class Stopping(Protocol):
    """Which rows draft a token, and which a further one. Rows of a batch are kept apart."""

    def begin(self, rows: int, device: torch.device) -> None:
        """A new batch."""

    def admit(self, row: int) -> None:
        """Another text takes this row."""

    def first(self) -> Tensor | None:
        """`[B, 1]`: draft at all? None: every row does. The drafter may try all the same."""

    def further(self, logits_BK: Tensor) -> Tensor | None:
        """`[B, 1]`: draft another token after one with these logits? None: every row does."""

    def observe(self, drafted_B: Tensor, accepted_B: Tensor) -> None:
        """What became of the round."""


class Threshold:
    """Stop once the confidence has fallen to a threshold (Kangaroo, arXiv 2404.18911, section 3.1).

    Args:
        threshold: the paper's eta; 0 never stops.
    """

    def __init__(self, threshold: float):
        self.threshold = threshold

    def begin(self, rows: int, device: torch.device) -> None:
        pass

    def admit(self, row: int) -> None:
        pass

    def first(self) -> None:
        return None

    def further(self, logits_BK: Tensor) -> Tensor | None:
        return confidence(logits_BK) > self.threshold if self.threshold > 0 else None

    def observe(self, drafted_B: Tensor, accepted_B: Tensor) -> None:
        pass


class ExpectedGain:
    """Stop where one more draft token gains less than the time it takes.

    In units of a step that drafts nothing, a round of n draft tokens takes 1 + n * cost. A further
    token adds as many tokens as it is likely to be accepted: the product of the confidences so far
    times this text's recent rate of acceptance. In its time the text would otherwise grow by cost
    times the recent speed. Where the rate is low enough no token is drafted at all.

    Args:
        cost: time of a draft token over that of a step that drafts nothing.
    """

    def __init__(self, cost: float):
        self.cost = cost

    def begin(self, rows: int, device: torch.device) -> None:
        self.rate_B = torch.full((rows,), PRIOR, device=device)
        # tokens written and time taken, both fading
        self.written_B = torch.full((rows,), float(MEMORY), device=device)
        self.time_B = self.written_B.clone()

    def admit(self, row: int) -> None:
        self.rate_B[row] = PRIOR
        self.written_B[row] = self.time_B[row] = MEMORY

    def first(self) -> Tensor:
        self.reach_B = torch.ones_like(self.rate_B)
        return self._pays()

    def further(self, logits_BK: Tensor) -> Tensor:
        self.reach_B = self.reach_B * confidence(logits_BK)[:, 0]
        return self._pays()

    def observe(self, drafted_B: Tensor, accepted_B: Tensor) -> None:
        judged_B = torch.minimum(drafted_B, accepted_B + 1)  # those after a wrong one tell nothing
        seen_B = accepted_B / judged_B.clamp(min=1)
        kept_B = (1 - 1 / MEMORY) ** judged_B
        self.rate_B = kept_B * self.rate_B + (1 - kept_B) * seen_B
        self.written_B = (1 - 1 / MEMORY) * self.written_B + accepted_B + 1
        self.time_B = (1 - 1 / MEMORY) * self.time_B + 1 + self.cost * drafted_B

    def _pays(self) -> Tensor:
        return (self.reach_B * self.rate_B > self.cost * self.written_B / self.time_B)[:, None]


def confidence(logits_BK: Tensor) -> Tensor:
    """The top-1 probability `[B, 1]`, read before temperature and filters."""
    return logits_BK.float().softmax(-1).amax(-1, keepdim=True)
