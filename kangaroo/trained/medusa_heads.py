"""Medusa's heads: each reads the target's final state and guesses a token further ahead.

`Head_k(SiLU(W_k h) + h)` for k = 1, ..., where h is the normed final state of the last token in the
cache: the target's own head says what follows it, and Medusa's k-th what comes k tokens after that
(Medusa-1, arXiv 2401.10774, section 2.1).

Shapes: B rows, N tokens of a block, H heads, D hidden size, K draft vocabulary.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kangaroo.model import LM
from kangaroo.trained.adapter import Adapter, Architecture, DraftHead


class MedusaHeads(nn.Module):
    """Trained on a frozen target, saved and loaded as an adapter is.

    Args:
        vocabulary_K: the tokens that heads of their own guess from, ascending; None is all of them.
    """

    def __init__(self, lm: LM, architecture: Architecture, vocabulary_K: Tensor | None = None):
        super().__init__()
        self.architecture = architecture
        self.exit_layer = lm.n_layers  # it reads what the target's own head reads
        size, count = lm.config.hidden_size, architecture.medusa_heads
        outputs = lm.config.vocab_size if vocabulary_K is None else len(vocabulary_K)
        self.blocks = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(count))
        own = count if architecture.own_head else 0
        self.heads = nn.ModuleList(nn.Linear(size, outputs, bias=False) for _ in range(own))

    @torch.no_grad()
    def start_from(self, lm: LM, vocabulary_K: Tensor | None = None) -> MedusaHeads:
        """Every head begins as the target's own."""
        rows = slice(None) if vocabulary_K is None else vocabulary_K
        for block in self.blocks:
            block.get_parameter("weight").zero_()
        for head in self.heads:
            head.get_parameter("weight").copy_(lm.head.weight[rows])
        return self

    def forward(self, h_BND: Tensor, index: int) -> Tensor:
        """What head `index`, counted from 0, reads at each token."""
        return F.silu(self.blocks[index](h_BND)) + h_BND

    def draft_heads(self, lm: LM, vocabulary_K: Tensor | None) -> list[DraftHead]:
        """One each, over the same tokens; a single one, the target's, where they have none."""
        return [DraftHead(lm, cast(nn.Linear, head), vocabulary_K) for head in self.heads] or [
            DraftHead(lm, None, vocabulary_K)
        ]


def build(
    lm: LM, exit_layer: int, architecture: Architecture, vocabulary_K: Tensor | None
) -> Adapter | MedusaHeads:
    """Whichever of the two `architecture` describes."""
    if architecture.medusa_heads:
        return MedusaHeads(lm, architecture, vocabulary_K)
    return Adapter(lm, exit_layer, architecture, vocabulary_K)
