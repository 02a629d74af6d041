"""Drafting token by token with a whole model's head: what draft models and skipped layers share.

Shapes: B rows, N draft nodes, W window, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kangaroo.batch import Batch
from kangaroo.cache import Block
from kangaroo.errors import ConfigError
from kangaroo.model import LM
from kangaroo.sampling import Rule, pick, warp
from kangaroo.tree import Draft, Tree


class Autoregressive(ABC):
    """Drafts a chain until every row's confidence has fallen to the threshold.

    Confidence is the top-1 probability, before temperature and filters; the token whose confidence
    was low is still verified.

    Args:
        lm: the model that drafts.
        window: committed tokens before the pending one that its first pass of a round takes again.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, lm: LM, steps: int, threshold: float, window: int):
        if steps < 1:
            raise ConfigError(f"drafter.steps must be 1 or more, not {steps}; see drafter=vanilla.")
        if not 0 <= threshold < 1:
            raise ConfigError(f"drafter.threshold must lie in [0, 1), not {threshold}.")
        self.lm, self.steps, self.threshold, self.window = lm, steps, threshold, window
        self.max_nodes = steps

    @abstractmethod
    def run(self, batch: Batch, tokens_BN: Tensor, block: Block) -> Tensor:
        """The output of the last layer, `[B, N, D]`."""

    def logits(self, x_BND: Tensor) -> Tensor:
        """Over the target's vocabulary."""
        return self.lm.logits(x_BND)

    def propose(self, batch: Batch) -> Draft:
        rejection = batch.sampling.rule is Rule.rejection and not batch.sampling.greedy
        window, steps = self.window, self.steps
        pending_B1, active_B1 = batch.last(1), ~batch.done_B[:, None]
        tree = Tree.chain(window + 1 + steps, batch.length_B.device)
        below = 0 if min(batch.lengths) > window else window
        start_B, used = batch.base_B - window, batch.used + steps
        block = self.lm.block(tree, start_B, used, batch.n_slots, below)
        tokens, valid, probs = [pending_B1], [torch.ones_like(active_B1)], []
        input_BN, at = batch.last(window + 1), block.narrow(0, window + 1)
        for step in range(1, steps + 1):
            logits_B1V = self.logits(self.run(batch, input_BN, at)[:, -1:])
            positions_B1 = batch.length_B[:, None] + step - 1
            input_BN = pick(logits_B1V, positions_B1, batch.sampling, batch.seeds_B)
            at = block.narrow(window + step, 1)
            tokens.append(input_BN)
            valid.append(active_B1)
            if rejection:
                probs.append(warp(logits_B1V, batch.sampling).softmax(-1))
            if self.threshold > 0 and step < steps:
                confidence_B1 = logits_B1V.float().softmax(-1).amax(-1)
                active_B1 = active_B1 & (confidence_B1 > self.threshold)
                if not active_B1.any():  # the one sync a drafted token that a threshold costs
                    break
        return Draft(
            tokens_BN=torch.cat(tokens, 1),
            tree=Tree.chain(len(tokens), batch.length_B.device),
            valid_BN=torch.cat(valid, 1),
            probs_BNV=torch.cat([torch.zeros_like(probs[0]), *probs], 1) if probs else None,
        )
