"""What a batch may draft: by what a verification costs, and how often its drafts were right."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

PACE = 2.0  # tokens that the time of a vanilla step has to gain, in a batch
PACE_ALONE = 1.5  # and where one text is decoded alone
PRIOR, PRIOR_RIGHT = 20, 9  # as if so many drafts had been seen, and so many begun right
# As if a row had tried so many draft tokens after right ones, and so many had been right.
ROW_PRIOR, ROW_PRIOR_RIGHT = 10, 5
FORGETTING = 0.95  # of both in a round without a draft, so that drafting is tried again
# A text alone of which less is known tries a token, dear as it may be: else nothing were learnt.
UNTRIED, TRY = 0.1, 0.99


@dataclass(eq=False)
class Budget:
    """Of one batch: every stepper asks it, and tells it of every verdict.

    Args:
        curve: of `VerifyCosts`; measured when it is first asked for.
        always: every row drafts as a text alone does.
        drafting: measures a token of a drafter's chain, in vanilla steps; None trusts the drafter.
    """

    curve: Callable[[int, int], list[float]]
    always: bool = False
    drafting: Callable[[Any], float] | None = None

    def __post_init__(self) -> None:
        self.curve = cache(self.curve)
        self.first_tried, self.first_right = 0, 0  # drafts, and how many began with a right token
        # of each row's text: draft tokens before which all were right, and those that were, too
        self.tried, self.right = defaultdict[int, float](float), defaultdict[int, float](float)

    def cost(self, rows: int, nodes: int) -> list[float]:
        """Of verifying 0 to `nodes` nodes in each of so many rows, in vanilla steps of these."""
        return self.curve(1 if self.always else rows, nodes)

    def admit(self, row: int) -> None:
        """Another text has taken a row: nothing is known of it yet."""
        self.tried[row] = self.right[row] = 0.0

    def limits(self, rows: Sequence[int], nodes: int, drafting: float, auto: bool) -> np.ndarray:
        """What the product of the confidences in the first n tokens of a row's chain has to exceed
        so that one more, which takes `drafting` vanilla steps, is drafted: `[rows, nodes]`, n from
        0 on.

        With `auto` that product times the share of tokens that were right in this text is the
        chance that one more is right too, and has to pay for drafting and verifying it. Otherwise
        this is left to the drafter's threshold, and to what a batch allows.
        """
        if not auto:
            of_all = self.min_chain_chances(len(rows), nodes, drafting)
            return np.tile(np.array(of_all, np.float32), (len(rows), 1))
        verifying = np.array(self.min_node_chances(len(rows), nodes, auto))
        shares = [(self.right[x] + ROW_PRIOR_RIGHT) / (self.tried[x] + ROW_PRIOR) for x in rows]
        needed = verifying + self.pace(len(rows)) * drafting
        limits = (needed / np.array(shares)[:, None]).astype(np.float32)
        if self.pace(len(rows)) == PACE_ALONE and needed[0] < 1:  # were all tokens right, it paid
            untried = [self.tried[x] < UNTRIED for x in rows]
            limits[untried, 0] = limits[untried, 0].clip(max=TRY)
        return limits

    def pace(self, rows: int) -> float:
        """Tokens that the time of a vanilla step of so many rows has to gain."""
        return PACE_ALONE if rows <= 1 or self.always else PACE

    def min_chain_chances(self, rows: int, nodes: int, drafting: float = 0.0) -> list[float]:
        """How likely the first n tokens of a chain must be right for one more to pay, n from 0 on;
        0 for one text alone, which is left to the drafter's own rule."""
        if rows <= 1 or self.always:
            return [0.0] * nodes
        costs = self.cost(rows, nodes)
        right = (self.first_right + PRIOR_RIGHT) / (self.first_tried + PRIOR)
        return [PACE * (drafting + costs[n + 1] - costs[n]) / right for n in range(nodes)]

    def min_node_chances(self, rows: int, nodes: int, auto: bool = False) -> list[float]:
        """How likely the n-th node must be right to pay for its verification, n from 0 on; 0 for
        one text alone, unless it is `auto`."""
        if not auto and (rows <= 1 or self.always):
            return [0.0] * nodes
        costs = self.cost(rows, nodes)
        return [self.pace(rows) * (costs[n + 1] - costs[n]) for n in range(nodes)]

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """A row's verdict."""
        if drafted:
            self.tried[row] += min(accepted + 1, drafted)
            self.right[row] += accepted
        else:
            self.tried[row] *= FORGETTING
            self.right[row] *= FORGETTING
        self.first_tried += drafted > 0
        self.first_right += accepted > 0
