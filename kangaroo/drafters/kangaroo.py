"""Kangaroo: shallow layers and a small adapter draft a chain until confidence falls.

Shapes: B rows, N draft nodes, D hidden size, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kangaroo.drafters.chain import Chain, Token, confidence
from kangaroo.drafters.early_exit import EarlyExit, EarlyExitConfig
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta
from kangaroo.engine.sampling import AnySampling, pick
from kangaroo.engine.tree import Draft
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel


@dataclass
class KangarooConfig(EarlyExitConfig):
    """Chain drafting with early stopping (arXiv 2404.18911, sections 3.1 and 3.2); confidence is
    the top-1 probability.
    """

    name: str = "kangaroo"

    def of(self, lm: TargetModel, trained: Any, heads: list[DraftHead]) -> Kangaroo:
        return Kangaroo(lm, trained, self.steps, self.threshold, heads[0])


class Kangaroo(EarlyExit, Chain):
    """Each token passes the target's layers below the exit, then the adapter, and verification
    starts from the shallow states of the whole draft. EAGLE's chain is the same with a layer of its
    own kind.
    """

    def __init__(
        self,
        lm: TargetModel,
        adapter: Layer,
        steps: int = 6,
        threshold: float = 0.6,
        head: DraftHead | None = None,
    ):
        super().__init__(lm, adapter, steps, threshold, head)
        self.hidden: list[Tensor] = []  # shallow states of the round's nodes

    def spread(self, logits_BK: Tensor) -> Tensor:
        return self.head.spread(logits_BK)

    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[Token]:
        self.read_prompts()

        acceleration, caches = self.lm.acceleration, self.caches(batch)
        meta, draws = acceleration.pin_inputs(
            caches, ("round",), self.shallow_BWD, meta, *batch.draws
        )
        work, inputs = partial(self.begun, batch), (batch.last(1), meta, self.shallow_BWD)
        f_B1D, f_BND, *deep = acceleration.step(caches, ("root",), work, *inputs)
        self.hidden = [f_B1D]
        for step in range(1, self.steps + 1):
            token_B1, logits_BK, reading, adapted_B1D, f_BND = self._draft(
                batch, step, f_BND, meta, *draws, *deep
            )
            self.hidden.append(f_BND)
            deep = [adapted_B1D] if self.reads_deep else []
            yield Token(token_B1, logits_BK, reading)

    def finish(self, draft: Draft, meta: ForwardMeta) -> Draft:
        padding = self.hidden[-1:] * (draft.tree.size - len(self.hidden))
        hidden_BND, self.hidden = torch.cat([*self.hidden, *padding], 1), []
        self.proposed = replace(draft, hidden_BND=hidden_BND, entry=self.exit_layer, meta=meta)
        return self.proposed

    def _draft(
        self, batch: Batch, step: int, f_BND: Tensor, meta: ForwardMeta, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """One draft token `[B, 1]`, its logits `[B, K]`, what the host reads of it, and the states
        that the next one starts from, `[B, 1, D]` each: the layer's, and the shallow one.

        Args:
            tensors: `Batch.draws`, and the deep states if the layer reads them.
        """

        def work(f_BND: Tensor, meta: ForwardMeta, *tensors: Tensor) -> tuple[Tensor, ...]:
            length_B, seeds_B, settings_B3, *deep = tensors
            after = self.window + step
            at = meta.narrow(0, after) if step == 1 else meta.narrow(after - 1, 1)
            at = at.to(f_BND.device)
            deep_BND = deep[0] if deep else None
            adapted_B1D = self.adapter(f_BND, deep_BND, at, self.cache.at(at))[:, -1:]
            likeliest = batch.sampling.greedy and not self.reads_logits
            chosen = self.head.choose(adapted_B1D[:, 0]) if likeliest else None
            if chosen is not None:
                token_B1, reading = chosen[0], chosen[1][:, 0]
                logits_BK = adapted_B1D.new_empty(0)
            else:
                logits_BK = self.head(adapted_B1D[:, 0])
                positions_B1 = length_B[:, None] + step - 1
                how = batch.sampling.reading(settings_B3)
                token_B1 = self._pick(logits_BK, how, positions_B1, seeds_B)
                reading = self.reading(logits_BK, how, positions_B1, seeds_B)
            f_B1D = self._shallow(token_B1, batch, meta.narrow(after, 1))
            return token_B1, logits_BK, reading, adapted_B1D, f_B1D

        # a graph a step, so that none overwrites what the round still reads of another
        key = ("draft", step, batch.sampling.kind)
        return self.lm.acceleration.step(self.caches(batch), key, work, f_BND, meta, *tensors)

    def reading(
        self, logits_BK: Tensor, sampling: AnySampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """What the host reads of a token: the confidence `[B]`."""
        return confidence(logits_BK)

    def _pick(
        self, logits_BK: Tensor, sampling: AnySampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """The token that the target would choose from these logits, `[B, 1]`."""
        if sampling.greedy:
            return self.head.token_of(logits_BK.argmax(-1, keepdim=True))
        return pick(self.spread(logits_BK)[:, None], positions_B1, sampling, seeds_B)
