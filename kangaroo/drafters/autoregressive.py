"""Drafting a chain with a whole model's head: what draft models and skipped layers share.

Shapes: B rows, N nodes, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor

from kangaroo.drafters.chain import Chain, Token, confidence
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, KVCache
from kangaroo.engine.sampling import pick
from kangaroo.models.target import TargetModel


class Autoregressive(Chain):
    """Each token is the input of the next pass.

    Args: those of `Chain`.
    """

    taps: tuple[int, ...] = ()
    needs_costs = False

    def __init__(self, lm: TargetModel, steps: int, threshold: float, window: int):
        self.lm, self.steps, self.threshold, self.window = lm, steps, threshold, window
        self.max_nodes = steps

    @abstractmethod
    def run(self, batch: Batch, tokens_BN: Tensor, meta: ForwardMeta) -> Tensor:
        """The output of the last layer, `[B, N, D]`."""

    @abstractmethod
    def caches(self, batch: Batch) -> tuple[KVCache, ...]:
        """All that `run` reads or writes."""

    def logits(self, x_BND: Tensor) -> Tensor:
        """Over the target's vocabulary, `[B, N, V]`."""
        return self.lm.logits(x_BND)

    def choose(self, x_BND: Tensor) -> tuple[Tensor, Tensor] | None:
        """See `TargetModel.choose`."""
        return self.lm.choose(x_BND)

    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[Token]:
        window, sampling = self.window, batch.sampling

        def work(
            input_BN: Tensor,
            meta: ForwardMeta,
            length_B: Tensor,
            seeds_B: Tensor,
            settings_B3: Tensor,
        ) -> tuple[Tensor, ...]:
            at = meta.narrow(0 if step == 1 else window + step - 1, input_BN.shape[1])
            x_B1D = self.run(batch, input_BN, at)[:, -1:]
            chosen = self.choose(x_B1D) if sampling.greedy else None
            if chosen is not None:
                return chosen[0], x_B1D.new_empty(0), chosen[1][:, 0]
            logits_B1V = self.logits(x_B1D)
            position_B1 = length_B[:, None] + step - 1
            token_B1 = pick(logits_B1V, position_B1, sampling.reading(settings_B3), seeds_B)
            return token_B1, logits_B1V[:, 0], confidence(logits_B1V[:, 0])

        input_BN = batch.last(window + 1)
        for step in range(1, self.steps + 1):
            # a graph a step, so that none overwrites what the round still reads of another
            key = ("draft", step, sampling.kind)
            inputs = input_BN, meta, *batch.draws
            token = Token(*self.lm.acceleration.step(self.caches(batch), key, work, *inputs))
            input_BN = token.id_B1
            yield token
