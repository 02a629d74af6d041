"""What became of drafts, by the names that vLLM gives a request's statistics
(`metrics.speculative_decoding`, vLLM's pull request 48915), so that what reads those reads ours.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Acceptance:
    """Counts over the rounds that had a draft.

    Args:
        histogram: rounds by how many of their draft tokens were accepted.
        drafted: draft tokens; all nodes of a tree.
        longest: draft tokens of a round, at most.
    """

    histogram: Counter[int] = field(default_factory=Counter)
    drafted: int = 0
    longest: int = 0

    def add(self, accepted: int, drafted: int) -> None:
        """Count a round; one without a draft does not count."""
        if drafted:
            self.histogram[accepted] += 1
            self.drafted += drafted
            self.longest = max(self.longest, drafted)

    @property
    def rounds(self) -> int:
        """How many had a draft."""
        return self.histogram.total()

    @property
    def accepted(self) -> int:
        """Draft tokens that were."""
        return sum(count * rounds for count, rounds in self.histogram.items())

    @property
    def by_position(self) -> list[int]:
        """In how many rounds the first draft token was accepted, the second, and so on."""
        last = max(self.histogram, default=0)
        return [sum(n for k, n in self.histogram.items() if k > place) for place in range(last)]

    def as_json(self) -> dict[str, Any]:
        """Lengths count the target's own token of a round, too: 1 is the least."""
        last = max(self.histogram, default=0)
        return {
            "mean_acceptance_length": 1 + self.accepted / max(self.rounds, 1),
            "draft_acceptance_rate": self.accepted / max(self.drafted, 1),
            "acceptance_histogram": [self.histogram[count] for count in range(last + 1)],
            "num_spec_steps": self.rounds,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": self.longest,
        }
