"""Drafting a chain with a whole model's head: what draft models and skipped layers share.

Shapes: B rows, N nodes, D hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from torch import Tensor

from kangaroo.batch import Batch
from kangaroo.cache import Block
from kangaroo.drafters.chain import Chain, Token
from kangaroo.model import LM
from kangaroo.sampling import pick


class Autoregressive(Chain):
    """Each token is the input of the next pass.

    Args: those of `Chain`.
    """

    taps: tuple[int, ...] = ()
    needs_costs = False

    def __init__(self, lm: LM, steps: int, threshold: float, window: int):
        self.lm, self.steps, self.threshold, self.window = lm, steps, threshold, window
        self.max_nodes = steps

    @abstractmethod
    def run(self, batch: Batch, tokens_BN: Tensor, block: Block) -> Tensor:
        """The output of the last layer, `[B, N, D]`."""

    def logits(self, x_BND: Tensor) -> Tensor:
        """Over the target's vocabulary, `[B, N, V]`."""
        return self.lm.logits(x_BND)

    def tokens(self, batch: Batch, block: Block) -> Iterator[Token]:
        window = self.window
        input_BN, at = batch.last(window + 1), block.narrow(0, window + 1)
        for step in range(1, self.steps + 1):
            logits_B1V = self.logits(self.run(batch, input_BN, at)[:, -1:])
            positions_B1 = batch.length_B[:, None] + step - 1
            input_BN = pick(logits_B1V, positions_B1, batch.sampling, batch.seeds_B)
            at = block.narrow(window + step, 1)
            yield Token(input_BN, logits_B1V[:, 0])
