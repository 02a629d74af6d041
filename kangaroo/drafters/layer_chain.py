"""A chain drafted by a layer on the target's shallow states: what Kangaroo and EAGLE share.

Shapes: B rows, N draft nodes, D hidden size, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kangaroo.drafters.chain import Chain, Token, confidence
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import Block
from kangaroo.engine.sampling import AnySampling, pick
from kangaroo.engine.tree import Draft
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import LM


class LayerChain(EarlyExit, Chain):
    """Each token passes the target's layers below the exit, then the layer; verification starts
    from the shallow states of the whole draft.
    """

    def __init__(
        self,
        lm: LM,
        adapter: Layer,
        steps: int = 6,
        threshold: float = 0.6,
        head: DraftHead | None = None,
    ):
        super().__init__(lm, adapter, steps, threshold, head)
        self.hidden: list[Tensor] = []  # shallow states of the round's nodes

    def spread(self, logits_BK: Tensor) -> Tensor:
        return self.head.spread(logits_BK)

    def tokens(self, batch: Batch, block: Block) -> Iterator[Token]:
        self.read_prompts()
        window = self.window
        f_B1D = self._shallow(batch.last(1), batch, block.narrow(window, 1))
        self.hidden = [f_B1D]
        f_BND = torch.cat([self.shallow_BWD, f_B1D], 1)
        first = block.narrow(0, window + 1).to(f_BND.device)
        before_BND = self.deep_before(first)
        deep = [] if before_BND is None else [before_BND]
        key, caches = ("round",), (batch.cache, self.cache)
        block, (length_B, seeds_B) = self.lm.acceleration.hold(
            caches, key, self.shallow_BWD, block, batch.length_B, batch.seeds_B
        )
        for step in range(1, self.steps + 1):
            token_B1, logits_BK, confidence_B, adapted_B1D, f_BND = self._draft(
                batch, step, f_BND, block, length_B, seeds_B, *deep
            )
            self.hidden.append(f_BND)
            deep = [adapted_B1D] if self.reads_deep else []
            yield Token(token_B1, logits_BK, confidence_B)

    def finish(self, draft: Draft, block: Block) -> Draft:
        hidden_BND, self.hidden = torch.cat(self.hidden, 1), []
        self.proposed = replace(draft, hidden_BND=hidden_BND, entry=self.exit_layer, block=block)
        return self.proposed

    def _draft(
        self, batch: Batch, step: int, f_BND: Tensor, block: Block, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """One draft token `[B, 1]`, its logits `[B, K]` and confidence `[B]`, and the states that
        the next one starts from, `[B, 1, D]` each: the layer's, and the shallow one.

        Args:
            tensors: lengths and seeds of the rows, and the deep states if the layer reads them.
        """

        def work(
            f_BND: Tensor, block: Block, length_B: Tensor, seeds_B: Tensor, *deep: Tensor
        ) -> tuple[Tensor, ...]:
            after = self.window + step
            at = block.narrow(0, after) if step == 1 else block.narrow(after - 1, 1)
            at = at.to(f_BND.device)
            deep_BND = deep[0] if deep else None
            adapted_B1D = self.adapter(f_BND, deep_BND, at, self.cache.at(at))[:, -1:]
            likeliest = batch.sampling.greedy and not self.reads_logits
            chosen = self.head.choose(adapted_B1D[:, 0]) if likeliest else None
            if chosen is not None:
                token_B1, confidence_B = chosen[0], chosen[1][:, 0]
                logits_BK = adapted_B1D.new_empty(0)
            else:
                logits_BK = self.head(adapted_B1D[:, 0])
                positions_B1 = length_B[:, None] + step - 1
                token_B1 = self._pick(logits_BK, batch.sampling, positions_B1, seeds_B)
                confidence_B = confidence(logits_BK)
            f_B1D = self._shallow(token_B1, batch, block.narrow(after, 1))
            return token_B1, logits_BK, confidence_B, adapted_B1D, f_B1D

        # a graph a step, so that none overwrites what the round still reads of another
        key = ("draft", step, repr(batch.sampling))
        caches = (batch.cache, self.cache)
        return self.lm.acceleration.step(caches, key, work, f_BND, block, *tensors)

    def _pick(
        self, logits_BK: Tensor, sampling: AnySampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """The token that the target would choose from these logits, `[B, 1]`."""
        if sampling.greedy:
            return self.head.token_of(logits_BK.argmax(-1, keepdim=True))
        return pick(self.spread(logits_BK)[:, None], positions_B1, sampling, seeds_B)
