"""Chains of a whole model's head: of draft models, and of targets with some layers left out.

Shapes: B rows, N tokens of a pass, D hidden size, K = the model's vocabulary.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.drafters.base import ChainConfig, RowStates
from kangaroo.drafters.chain import Chain, DraftToken
from kangaroo.drafters.layer_search import Subset
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, KVCache, Tensors
from kangaroo.engine.tree import Draft
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel
from kangaroo.utils.memory import weight_bytes


class WholeHead(DraftHead):
    """Final norm and head of a model that drafts, as if its vocabulary were of `size` tokens: those
    that it lacks are never drafted, nor are those beyond."""

    def __init__(self, lm: TargetModel, size: int | None = None):
        super().__init__(lm)
        self.lm, self.more = lm, 0 if size is None else size - lm.config.vocab_size

    def __call__(self, x_MD: Tensor) -> Tensor:
        logits_MV = self.lm.logits(x_MD[:, None])[:, 0]
        return F.pad(logits_MV, (0, self.more), value=-torch.inf) if self.more else logits_MV

    def choose(self, x_MD: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.lm.choose(x_MD[:, None]) if self.more >= 0 else None


class Autoregressive(Chain):
    """Each token is the input of the next pass, after a first one with the window. By default the
    target drafts on its own cache by some of its layers: committed keys are the whole model's, and
    verification writes those of the draft again.

    Attributes:
        cut: whose layers these are: the target, or the same model cut more finely.
        runs: those that run in a row, and in which rows, `[B, 1, 1]`; None in all.
    """

    runs: list[tuple[range, Tensor | None]]

    def __init__(self, lm: TargetModel, steps: int, threshold: float | str, window: int):
        super().__init__(lm, steps, threshold)
        self.cut, self.window, self.head = lm, window, WholeHead(lm)

    def run(self, batch: Batch, tokens_BN: Tensor, meta: ForwardMeta) -> Tensor:
        """The output of the last layer, `[B, N, D]`."""
        x_BND, meta = self.lm.embed(tokens_BN), replace(meta, recordable=True)
        for layers, kept_B11 in self.runs:
            out_BND, _ = self.cut.run(x_BND, batch.cache, meta, layers)
            if kept_B11 is not None:
                kept_B11, x_BND = kept_B11.to(out_BND.device), x_BND.to(out_BND.device)
                out_BND = torch.where(kept_B11, out_BND, x_BND)
            x_BND = out_BND
        return x_BND

    def caches(self, batch: Batch) -> tuple[KVCache, ...]:
        """All that `run` reads or writes."""
        return (batch.cache,)

    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[DraftToken]:
        def work(input_BN: Tensor, meta: ForwardMeta, draws: Tensors) -> DraftToken:
            first = 0 if step == 1 else self.window + step - 1
            x_BND = self.run(batch, input_BN, meta.narrow(first, input_BN.shape[1]))
            return self.draw(batch, step, x_BND[:, -1:], draws)

        input_BN = batch.last(self.window + 1)
        for step in range(1, self.steps + 1):
            # a graph a step, so that none overwrites what the round still reads of another
            key, inputs = ("draft", step, batch.sampling.kind), (input_BN, meta, batch.draws)
            token = self.lm.acceleration.replay(self.caches(batch), key, work, *inputs)
            input_BN = token.id_B1
            yield token


@dataclass
class Choice:
    """What the drafts of a text leave out, and how long it was when that was chosen."""

    skip: Subset
    length: int = 0


class LayerChoice(Autoregressive):
    """Which layers are left out is each row's own, and begins anew with another text.

    What any row keeps runs for all rows, and changes nothing in those that leave it out. Each layer
    is a graph of its own, and a drafted token is none, since others are left out soon. A text
    begins without `first`. `improve` runs as many tokens of a row at once as are `judged`.
    """

    rows: RowStates[Any]

    def __init__(
        self, lm: TargetModel, cut: TargetModel, first: Subset, options: ChainConfig, judged: int
    ):
        super().__init__(lm, options.steps, options.threshold, window=0)
        self.cut, self.first, self.max_nodes = cut, first, max(self.steps, judged)
        whole = weight_bytes(*cut.layers, lm.head)
        self.shares = [weight_bytes(layer) / whole for layer in cut.layers]  # of a vanilla step
        self.draft_cost = self.cost_without(first)

    def cost_without(self, skip: Collection[int]) -> float:
        """Of a drafted token, in vanilla steps."""
        return 1 - sum(self.shares[layer] for layer in skip)

    def start(self, row: int, text: list[int]) -> Choice:
        """Of a text whose prompt and first token are there."""
        return Choice(self.first)

    @abstractmethod
    def improve(self, batch: Batch, choices: dict[int, Choice]) -> None:
        """Choose, in `skip`, what the drafts of these rows leave out from now on."""

    def begin(self, batch: Batch) -> None:
        self.rows = RowStates(self.start)

    def propose(self, batch: Batch) -> Draft:
        limits = self.limits(batch, batch.active)
        rows = (limits[:, 0] < 1).nonzero()[0].tolist()
        if choices := {row: self.rows.of(row, batch.texts[row]) for row in rows}:
            self.improve(batch, choices)
            self.choose_runs({row: choice.skip for row, choice in choices.items()}, batch)
        return super().propose(batch)

    def choose_runs(self, skips: dict[int, Subset], batch: Batch) -> None:
        """Of these rows, by what each leaves out; and what a drafted token then costs."""
        layers = range(self.cut.n_layers)
        keeps = [tuple(layer not in skip for skip in skips.values()) for layer in layers]
        unkept = [layer for layer in layers if not any(keeps[layer])]
        self.draft_cost = self.cost_without(unkept)
        one_by_one = self.lm.acceleration.graphs is not None
        self.runs = []
        for (kept, _), group in groupby(layers, lambda layer: (keeps[layer], one_by_one * layer)):
            first, *_, last = [*group] * 2
            kept_B11 = None
            if not all(kept):
                in_row = dict(zip(skips, kept, strict=True))
                kept_B = torch.tensor([in_row.get(row, True) for row in range(batch.size)])
                kept_B11 = kept_B[:, None, None].to(self.lm.device)
            self.runs += [(range(first, last + 1), kept_B11)] if any(kept) else []

    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[DraftToken]:
        return super().tokens(batch, replace(meta, recordable=False))
