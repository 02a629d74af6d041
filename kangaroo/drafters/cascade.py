"""A cascade of two drafters: the second drafts where the first finds nothing.

Shapes: B rows, N draft nodes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.drafters.base import Drafter, DrafterConfig
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, Taps
from kangaroo.engine.tree import Draft, Tree, Verdict
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError, naming


@dataclass
class CascadeConfig(DrafterConfig):
    """Two drafters in one (after CAS-Spec, arXiv 2510.26843): any two values of `drafter=`.

    Args:
        first: a cheap drafter that sometimes drafts nothing, such as a lookup.
        second: drafts in rows where the first drafted nothing.
    """

    name: str = "cascade"
    first: Any = "???"
    second: Any = "???"

    def build(self, lm: TargetModel) -> Drafter:
        return Cascade(self.first.build(lm), self.second.build(lm))

    def settings(self) -> dict[str, Any]:
        parts = {}
        for name, part in {"first": self.first, "second": self.second}.items():
            if not isinstance(part, DrafterConfig):
                fix = f"Write drafter@drafter.{name}={part}."
                raise ConfigError(f"drafter.{name}={part} is no drafter's config. {fix}")
            with naming(f"drafter.{name}"):
                parts[name] = part.settings()
        return {"name": self.name, **parts}

    def made_by(self) -> dict[str, Any]:
        return self.first.made_by() | self.second.made_by()


class Cascade(Drafter):
    """Both drafters see every round, whichever drafted in it."""

    def __init__(self, first: Drafter, second: Drafter):
        self.first = first
        self.second = second
        self.parts = (first, second)
        self.taps = tuple(sorted({*first.taps, *second.taps}))
        self.max_nodes = first.max_nodes + second.max_nodes
        self.rereads = max(first.rereads, second.rereads)
        self.needs_costs = first.needs_costs or second.needs_costs

    def begin(self, batch: Batch) -> None:
        for part in self.parts:
            part.begin(batch)

    def copy_prefix(self, source: int, row: int, count: int) -> None:
        for part in self.parts:
            part.copy_prefix(source, row, count)

    def prefill(self, batch: Batch, tokens_1T: Tensor, meta: ForwardMeta, taps: Taps) -> None:
        for part in self.parts:
            part.prefill(batch, tokens_1T, meta, taps)

    def propose(self, batch: Batch) -> Draft:
        first = self.first.propose(batch)
        drafts_B = first.valid_BN[:, 1:].any(1)
        if first.tree.size > 1 and (drafts_B | batch.done_B).all():  # one sync
            return first
        second = self.second.propose(batch)
        return second if first.tree.size == 1 else either(drafts_B, first, second)

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Taps) -> None:
        for part in self.parts:
            part.observe(batch, draft, verdict, taps)


def either(first_B: Tensor, first: Draft, second: Draft) -> Draft:
    """The first draft in rows where `first_B` is true, the second in others. Verification starts
    from the embeddings, since the states of one drafter may lie where the other's nodes are."""
    size = max(first.tree.size, second.tree.size)

    def merged(*both: Tensor) -> Tensor:
        first_BN, second_BN = (F.pad(x_BN, (0, size - x_BN.shape[1])) for x_BN in both)
        return torch.where(first_B[:, None], first_BN, second_BN)

    tree = Tree.chain(size, first_B.device)
    if not (first.tree.is_chain and second.tree.is_chain):
        parents_BN = merged(first.tree.parents_BN, second.tree.parents_BN)
        tree = Tree(parents_BN, max(first.tree.max_depth, second.tree.max_depth))
    tokens_BN = merged(first.tokens_BN, second.tokens_BN)
    return Draft(tokens_BN, tree, merged(first.valid_BN, second.valid_BN))
