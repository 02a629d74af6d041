"""Chains that a model's own head drafts: draft models, and targets that skip some of their layers.

Shapes: B rows, N tokens of a pass, M tokens of all rows, D hidden size, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.drafters.base import ChainConfig, RowStates
from kangaroo.drafters.chain import Chain, DraftToken
from kangaroo.drafters.layer_search import Subset
from kangaroo.engine.backend import Chosen
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, KVCache, Tensors
from kangaroo.engine.tree import Draft
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel
from kangaroo.utils.memory import weight_bytes


class WholeHead(DraftHead):
    """The final norm and head of a model that drafts for a target with `size` tokens. If that has
    more tokens, it never drafts these; if it has fewer, `padding` is below 0."""

    def __init__(self, lm: TargetModel, size: int):
        super().__init__(lm)
        self.lm = lm
        self.padding = size - lm.config.vocab_size

    def __call__(self, x_MD: Tensor) -> Tensor:
        logits_MV = self.lm.logits(x_MD[:, None])[:, 0]
        return F.pad(logits_MV, (0, self.padding), value=-torch.inf) if self.padding else logits_MV

    def choose(self, x_MD: Tensor) -> Chosen | None:
        return self.lm.choose(x_MD[:, None]) if self.padding >= 0 else None


class Autoregressive(Chain):
    """Each token is the input of the next pass; the first pass reads the window, too. By default
    the target drafts with some of its layers on its own cache: the committed keys are those of the
    whole model, and verification writes those of the draft again.

    Attributes:
        layered: the model whose layers run: the target, or the same model in smaller layers.
        runs: ranges of layers that run, each with the rows that run it, `[B, 1, 1]`; None for all.
    """

    head: WholeHead
    runs: list[tuple[range, Tensor | None]]

    def __init__(self, lm: TargetModel, steps: int, threshold: float | str, window: int):
        super().__init__(lm, steps, threshold)
        self.layered = lm
        self.window = window
        self.head = WholeHead(lm, lm.config.vocab_size)

    def run(self, batch: Batch, tokens_BN: Tensor, meta: ForwardMeta) -> Tensor:
        """The output of the last layer, `[B, N, D]`."""
        x_BND = self.lm.embed(tokens_BN)
        meta = replace(meta, recordable=True)
        for layers, runs_B11 in self.runs:
            out_BND, _ = self.layered.run(x_BND, batch.cache, meta, layers)
            if runs_B11 is None:
                x_BND = out_BND
            else:
                x_BND = torch.where(runs_B11.to(out_BND.device), out_BND, x_BND.to(out_BND.device))
        return x_BND

    def caches(self, batch: Batch) -> tuple[KVCache, ...]:
        """The caches that `run` reads or writes."""
        return (batch.cache,)

    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[DraftToken]:
        input_BN = batch.last(self.window + 1)
        for step in range(1, self.steps + 1):
            # a graph for each step, so that none overwrites what the round still reads of another
            key = ("draft", step, batch.sampling.kind)
            work = partial(self.draft_token, batch, step)
            caches = self.caches(batch)
            token = self.lm.backend.replay(caches, key, work, input_BN, meta, batch.draws)
            input_BN = token.id_B1
            yield token

    def draft_token(
        self, batch: Batch, step: int, input_BN: Tensor, meta: ForwardMeta, draws: Tensors
    ) -> DraftToken:
        """One token of the chain; `meta` is the block of the window, pending token and draft."""
        first = 0 if step == 1 else self.window + step - 1
        x_BND = self.run(batch, input_BN, meta.narrow(first, input_BN.shape[1]))
        return self.draw(batch, step, x_BND[:, -1:], draws)


@dataclass
class Choice:
    """The layers that a text's drafts skip, and the text's length when they were chosen."""

    skip: Subset
    length: int = 0


class LayerChoice(Autoregressive):
    """The drafts of each row skip layers of their own, at first `first`. A layer that any row needs
    runs for all rows, and its output is dropped in rows that skip it. Each layer is a CUDA graph of
    its own, since the skipped layers change too often for graphs of whole tokens."""

    rows: RowStates[Any]

    def __init__(self, lm: TargetModel, layered: TargetModel, first: Subset, options: ChainConfig):
        super().__init__(lm, options.steps, options.threshold, window=0)
        self.layered = layered
        self.first = first
        total = weight_bytes(*layered.layers, lm.head)
        self.shares = [weight_bytes(layer) / total for layer in layered.layers]  # of a vanilla step
        self.draft_cost = self.cost_without(first)

    def cost_without(self, skip: Collection[int]) -> float:
        """The cost of a draft token that skips these layers, in vanilla steps."""
        return 1 - sum(self.shares[layer] for layer in skip)

    def start(self, row: int, text: list[int]) -> Choice:
        """The first choice for a text, which has its prompt and first token."""
        return Choice(self.first)

    @abstractmethod
    def improve(self, batch: Batch, choices: dict[int, Choice]) -> None:
        """Set the layers that the next drafts of these rows skip (`Choice.skip`). For that it may
        run up to `max_nodes` tokens of a row at once."""

    def begin(self, batch: Batch) -> None:
        self.rows = RowStates(self.start)

    def propose(self, batch: Batch) -> Draft:
        limits = self.limits(batch, batch.active)
        rows = (limits[:, 0] < 1).nonzero()[0].tolist()
        if choices := {row: self.rows.get(row, batch.texts[row]) for row in rows}:
            self.improve(batch, choices)
            self.choose_runs({row: choice.skip for row, choice in choices.items()}, batch)
        return super().propose(batch)

    def choose_runs(self, skips: dict[int, Subset], batch: Batch) -> None:
        """Set `runs` and the cost of a draft token, by the layers that each of these rows skips."""
        layers = range(self.layered.n_layers)
        skipping = [{row for row, skip in skips.items() if layer in skip} for layer in layers]
        self.draft_cost = self.cost_without([x for x in layers if len(skipping[x]) == len(skips)])
        self.runs = []
        alone = self.lm.backend.records
        for (rows, _), group in groupby(layers, lambda x: (skipping[x], x if alone else 0)):
            run = list(group)
            runs_B11 = None
            if rows:
                runs_B = torch.tensor([row not in rows for row in range(batch.size)])
                runs_B11 = runs_B[:, None, None].to(self.lm.device)
            if len(rows) < len(skips):
                self.runs.append((range(run[0], run[-1] + 1), runs_B11))

    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[DraftToken]:
        return super().tokens(batch, replace(meta, recordable=False))
