"""Chains of a whole model's head, as draft models and skipped layers draft them.

Shapes: B rows, N tokens of a pass, D hidden size, K = the model's vocabulary.
"""

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor

from kangaroo.drafters.base import limit
from kangaroo.drafters.chain import Chain, DraftToken
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, KVCache
from kangaroo.models.target import TargetModel


class Autoregressive(Chain):
    """Each token is the input of the next pass."""

    taps: tuple[int, ...] = ()

    def __init__(self, lm: TargetModel, steps: int, threshold: float | str, window: int):
        self.lm, self.steps, self.window = lm, steps, window
        self.threshold, self.auto = limit(threshold)
        self.needs_costs = self.auto
        self.max_nodes = steps

    @abstractmethod
    def run(self, batch: Batch, tokens_BN: Tensor, meta: ForwardMeta) -> Tensor:
        """The output of the last layer, `[B, N, D]`."""

    @abstractmethod
    def caches(self, batch: Batch) -> tuple[KVCache, ...]:
        """All that `run` reads or writes."""

    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[DraftToken]:
        def work(input_BN: Tensor, meta: ForwardMeta, *draws: Tensor) -> DraftToken:
            first = 0 if step == 1 else self.window + step - 1
            x_BND = self.run(batch, input_BN, meta.narrow(first, input_BN.shape[1]))
            return self.draw(batch, step, x_BND[:, -1:], *draws)

        input_BN = batch.last(self.window + 1)
        for step in range(1, self.steps + 1):
            # a graph a step, so that none overwrites what the round still reads of another
            key, inputs = ("draft", step, batch.sampling.kind), (input_BN, meta, *batch.draws)
            token = DraftToken(*self.lm.acceleration.step(self.caches(batch), key, work, *inputs))
            input_BN = token.id_B1
            yield token

    def choose(self, x_B1D: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.lm.choose(x_B1D)

    def logits(self, x_B1D: Tensor) -> Tensor:
        return self.lm.logits(x_B1D)[:, 0]

    def spread(self, logits_BK: Tensor) -> Tensor:
        return logits_BK

    def token_of(self, index: Tensor) -> Tensor:
        return index
