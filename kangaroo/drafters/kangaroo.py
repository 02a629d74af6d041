"""Kangaroo (arXiv 2404.18911): shallow layers and a small adapter draft while they are confident.

Shapes: B rows, N draft nodes, D hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kangaroo.drafters.base import Drafter, EarlyExitConfig
from kangaroo.drafters.chain import Chain, DraftToken
from kangaroo.drafters.early_exit import EarlyExit, Read
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, Tensors
from kangaroo.engine.tree import Draft
from kangaroo.models.target import TargetModel


@dataclass
class KangarooConfig(EarlyExitConfig):
    """Chain drafting with early stopping (arXiv 2404.18911, sections 3.1 and 3.2)."""

    name: str = "kangaroo"

    def build(self, lm: TargetModel) -> Drafter:
        layer, head = self.load(lm)
        return Kangaroo(lm, layer, self, head)


class Kangaroo(EarlyExit, Chain):
    """The draft model of section 3.1: the target's layers below the exit, the adapter, and the
    target's head. It drafts until the confidence falls to the threshold (section 3.2, in
    `Chain.draft`); verification continues from the shallow states. EAGLE has another layer."""

    hidden: list[Tensor]  # shallow states of the round's nodes

    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[DraftToken]:
        meta, draws = self.begin_round(batch, meta)
        start = partial(self.start, batch)
        f_B1D, read = self.replay(batch, ("root",), start, batch.last(1), meta, self.shallow_BWD)
        self.hidden = [f_B1D]
        for step in range(1, self.steps + 1):
            # a graph for each step, so that none overwrites what the round still reads of another
            key = ("draft", step, batch.sampling.kind)
            work = partial(self.draft_token, batch, step)
            token, read = self.replay(batch, key, work, read, meta, draws)
            self.hidden.append(read[0])
            yield token

    def draft_token(
        self, batch: Batch, step: int, read: Read, meta: ForwardMeta, draws: Tensors
    ) -> tuple[DraftToken, Read]:
        """One token of section 3.1: adapter, head, and the shallow layers on what was drafted. It
        reads the last token's shallow state, in the first step after the window's, and what a fused
        adapter reads beside; `meta` is the block of window, pending token and draft. Returns the
        token, its shallow state and, from a fused adapter, the adapter's, `[B, 1, D]`."""
        end = self.window + step
        block = meta.narrow(0, end) if step == 1 else meta.narrow(end - 1, 1)
        block = block.to(read[0].device)
        adapted_B1D = self.adapter(*read, block, self.cache.at(block))[:, -1:]
        token = self.draw(batch, step, adapted_B1D, draws)
        f_B1D = self.run_shallow(token.id_B1, batch, meta.narrow(end, 1))
        return token, (f_B1D, adapted_B1D if self.reads_deep else None)

    def finish(self, draft: Draft, meta: ForwardMeta) -> Draft:
        """Let verification begin at the exit layer, whose states are known."""
        padding = self.hidden[-1:] * (draft.tree.size - len(self.hidden))
        hidden_BND = torch.cat([*self.hidden, *padding], 1)
        self.hidden = []  # frees them
        return replace(draft, hidden_BND=hidden_BND, entry=self.exit_layer, meta=meta)
