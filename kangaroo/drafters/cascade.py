"""A cascade of two drafters: the second drafts where the first finds nothing.

Shapes: B rows, N draft nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.drafters.base import Drafter, DrafterConfig, FromText
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta
from kangaroo.engine.tree import Draft, Tree
from kangaroo.engine.verify import Verdict
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError


@dataclass
class CascadeConfig(DrafterConfig):
    """Two drafters in one (after CAS-Spec, arXiv 2510.26843): any two that `drafter=` knows.

    Args:
        first: asked first, and cheap; it must be able to find nothing, as a lookup does.
        second: drafts in rows where the first found nothing.
        extend: the first goes on where a chain of the second ends; it must read the text alone.
    """

    name: str = "cascade"
    first: Any = "???"
    second: Any = "???"
    extend: bool = False

    def build(self, lm: TargetModel) -> Cascade:
        """Errors: those of both drafters, and `ConfigError`."""
        return Cascade(lm, self.first.build(lm), self.second.build(lm), self.extend)

    def settings(self) -> dict[str, Any]:
        parts = {"first": self.first.settings(), "second": self.second.settings()}
        return {"name": self.name, "extend": self.extend} | parts

    def made_by(self) -> dict[str, Any]:
        return self.first.made_by() | self.second.made_by()


class Cascade:
    """Each of the two sees every round, whoever drafted in it."""

    def __init__(self, lm: TargetModel, first: Drafter, second: Drafter, extend: bool = False):
        if extend and not isinstance(first, FromText):
            raise ConfigError(
                "drafter.extend=true needs a first drafter that reads the text alone, such as "
                "prompt_lookup; leave it off for others."
            )
        self.lm, self.first, self.second, self.extend = lm, first, second, extend
        self.taps: tuple[int, ...] = tuple(sorted({*first.taps, *second.taps}))
        self.max_nodes = first.max_nodes + second.max_nodes
        self.supports_prefix_reuse = first.supports_prefix_reuse and second.supports_prefix_reuse
        self.needs_costs = first.needs_costs or second.needs_costs

    def begin(self, batch: Batch) -> None:
        self.first.begin(batch)
        self.second.begin(batch)

    def copy_prefix(self, source: int, row: int, count: int) -> None:
        self.first.copy_prefix(source, row, count)
        self.second.copy_prefix(source, row, count)

    def prefill(
        self, batch: Batch, tokens_1T: Tensor, meta: ForwardMeta, taps: dict[int, Tensor]
    ) -> None:
        self.first.prefill(batch, tokens_1T, meta, taps)
        self.second.prefill(batch, tokens_1T, meta, taps)

    def propose(self, batch: Batch) -> Draft:
        first = self.first.propose(batch)
        found_B = first.valid_BN[:, 1:].any(1)
        if first.tree.size > 1 and (found_B | batch.done_B).all():  # one sync
            return first
        second = self.second.propose(batch)
        if self.extend:
            second = self._extended(batch, second)
        return second if first.tree.size == 1 else either(found_B, first, second)

    def observe(
        self, batch: Batch, draft: Draft, verdict: Verdict, taps: dict[int, Tensor]
    ) -> None:
        self.first.observe(batch, draft, verdict, taps)
        self.second.observe(batch, draft, verdict, taps)

    def _extended(self, batch: Batch, draft: Draft) -> Draft:
        """A chain, gone on from by the first drafter."""
        assert isinstance(self.first, FromText)
        if not draft.tree.is_chain:
            return draft
        # the host reads the draft: two syncs
        counts = (draft.valid_BN.sum(1) - 1).tolist()
        drafted = [
            row[:count] for row, count in zip(draft.tokens_BN[:, 1:].tolist(), counts, strict=True)
        ]
        longer = [
            chain + self.first.continuation(row, batch.texts[row] + chain)
            for row, chain in enumerate(drafted)
        ]
        if longer == drafted:
            return draft
        extended = Draft.listed(batch.last(1), longer)
        if draft.hidden_BND is not None:  # the new nodes have to catch up with the others
            size, kept = extended.tree.size, 1 + min(counts)
            meta = self.lm.forward_meta(
                extended.tree, batch.base_B, batch.used + size, batch.n_slots
            )
            x_BND = self.lm.embed(extended.tokens_BN[:, kept:])
            at = meta.narrow(kept, size - kept)
            x_BND, _ = self.lm.run(x_BND, batch.cache, at, range(draft.entry))
            extended.hidden_BND = torch.cat([draft.hidden_BND[:, :kept], x_BND], 1)
            extended.entry, extended.meta = draft.entry, meta
        return extended


def either(first_B: Tensor, first: Draft, second: Draft) -> Draft:
    """Of each row one of two drafts. It begins at the embeddings again: what a drafter has computed
    of its nodes lies where the other's nodes may be.
    """
    size = max(first.tree.size, second.tree.size)
    pick_B1 = first_B[:, None]

    def merged(one_BN: Tensor, other_BN: Tensor) -> Tensor:
        one_BN, other_BN = (F.pad(x, (0, size - x.shape[1])) for x in (one_BN, other_BN))
        return torch.where(pick_B1, one_BN, other_BN)

    tree = Tree.chain(size, first_B.device)
    if not (first.tree.is_chain and second.tree.is_chain):
        parents_BN = merged(first.tree.parents_BN, second.tree.parents_BN)
        tree = Tree(parents_BN, max(first.tree.max_depth, second.tree.max_depth))
    tokens_BN = merged(first.tokens_BN, second.tokens_BN)
    return Draft(tokens_BN, tree, merged(first.valid_BN, second.valid_BN))
