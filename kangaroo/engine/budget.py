"""How much a batch may draft, by the cost of verification and by how often drafts were right."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

# Tokens that drafting has to gain in the time of a vanilla step: in a batch, and in a text alone.
MIN_GAIN = 2.0
MIN_GAIN_ALONE = 1.0
# Counts before anything was tried, and right ones: of drafts' first tokens, and of a row's tokens.
PRIOR = 20
PRIOR_RIGHT = 9
ROW_PRIOR = 10
ROW_PRIOR_RIGHT = 5
FORGETTING = 0.95  # factor of a row's counts in a round without a draft, so that it tries again
UNTRIED = 0.1  # a text alone that tried fewer tokens drafts one at any cost, in order to learn
TRY = 0.99  # the limit for this token


@dataclass(eq=False)
class Budget:
    """The budget of one batch, which learns from every verdict.

    Args:
        curve: `VerifyCosts.curve`; the costs are measured at the first call.
        always: every row drafts as if it was alone.
        vanilla_seconds: the time of a vanilla step, by which drafters measure what drafts cost;
            None trusts their estimate.
    """

    curve: Callable[[int, int], list[float]]
    always: bool = False
    vanilla_seconds: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        self.curve = cache(self.curve)
        self.first_tried = self.first_right = 0  # drafts, and those whose first token was right
        # by row: draft tokens with only right ones before them, and how many of these were right
        self.tried = defaultdict[int, float](float)
        self.right = defaultdict[int, float](float)

    def cost(self, rows: int, nodes: int) -> list[float]:
        """The cost of verifying 0 to `nodes` nodes in each of `rows` rows, in vanilla steps."""
        return self.curve(1 if self.always else rows, nodes)

    def admit(self, row: int) -> None:
        """Forget a row's counts, since another text has taken it."""
        self.tried[row] = self.right[row] = 0.0

    def limits(self, rows: Sequence[int], nodes: int, drafting: float, auto: bool) -> np.ndarray:
        """The limits, `[rows, nodes]`, that the product of the confidences in the first n tokens of
        a row's chain has to exceed for one more token, which costs `drafting` vanilla steps. With
        `auto` that product times the share of right tokens in the text has to pay for drafting and
        verifying it. Otherwise the drafter's threshold decides, within what a batch allows."""
        if not auto:
            chances = [self.min_chain_chances(len(rows), nodes, drafting)]
            return np.array(chances * len(rows), np.float32).reshape(len(rows), nodes)
        gain = self.min_gain_per_step(len(rows))
        needed = [x + gain * drafting for x in self.min_node_chances(len(rows), nodes, auto)]
        limits = []
        for row in rows:
            share = (self.right[row] + ROW_PRIOR_RIGHT) / (self.tried[row] + ROW_PRIOR)
            limits.append([chance / share for chance in needed])
            if gain == MIN_GAIN_ALONE and needed[0] < 1 and self.tried[row] < UNTRIED:
                limits[-1][0] = min(limits[-1][0], TRY)  # it pays if all tokens are right
        return np.array(limits, np.float32).reshape(len(rows), nodes)

    def min_chain_chances(self, rows: int, nodes: int, drafting: float = 0.0) -> list[float]:
        """By n, how likely the first n tokens of a chain have to be right for one more to pay; 0
        for a text alone, where the drafter's own rule decides."""
        if self.min_gain_per_step(rows) == MIN_GAIN_ALONE:
            return [0.0] * nodes
        gains = self.min_node_chances(rows, nodes)
        right = (self.first_right + PRIOR_RIGHT) / (self.first_tried + PRIOR)
        return [(MIN_GAIN * drafting + gain) / right for gain in gains]

    def min_node_chances(self, rows: int, nodes: int, auto: bool = False) -> list[float]:
        """How likely each of `nodes` nodes has to be right to pay for its verification; 0 for a
        text alone, unless it is `auto`."""
        if not auto and self.min_gain_per_step(rows) == MIN_GAIN_ALONE:
            return [0.0] * nodes
        costs = self.cost(rows, nodes)
        return [self.min_gain_per_step(rows) * (costs[n + 1] - costs[n]) for n in range(nodes)]

    def min_gain_per_step(self, rows: int) -> float:
        """The tokens that drafting has to gain in the time of a vanilla step of `rows` rows."""
        return MIN_GAIN_ALONE if rows <= 1 or self.always else MIN_GAIN

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        if drafted:
            self.tried[row] += min(accepted + 1, drafted)
            self.right[row] += accepted
        else:
            self.tried[row] *= FORGETTING
            self.right[row] *= FORGETTING
        self.first_tried += drafted > 0
        self.first_right += accepted > 0
