"""Medusa's heads, each of which reads the target's final state and guesses a token further ahead.

Head k computes `Head_k(SiLU(W_k h) + h)`, where h is the normed final state of the last token in
the cache. The target's head predicts the next token, and Medusa's k-th head the one k tokens later
(Medusa-1, arXiv 2401.10774, section 2.1).

Shapes: B rows, T tokens, N tokens of a block, M positions, C positions of a chunk, G guesses, H
heads, D hidden size, K draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from kangaroo.engine.cache import ForwardMeta, Taps
from kangaroo.heads import base
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import shift_right
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Layers

GUESSES = 10  # of each head; the drafter's tree takes the best ones
CHUNK = 256  # positions whose logits are in memory at the same time


@dataclass
class MedusaHeadsConfig(base.HeadConfig):
    """The number of heads, and their parts."""

    heads: Layers = 4  # each guesses one token further ahead
    own_head: bool = True  # give each an LM head of its own, initialized from the target's
    bias: bool = False  # give the linear layers a bias, as in the released heads

    drafter: ClassVar[str] = "medusa"
    shares_weights: ClassVar[bool] = False

    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "MedusaHeads":
        return MedusaHeads(lm, self, vocabulary_K)

    def fixed_exit(self, lm: TargetModel) -> int:
        return lm.n_layers  # the heads read the same states as the target's head

    @property
    def fixed_steps(self) -> int:
        return self.heads


class MedusaHeads(base.Trainable):
    """Heads that are saved and loaded like an adapter; see `HeadConfig.build`."""

    architecture: MedusaHeadsConfig

    def __init__(
        self, lm: TargetModel, architecture: MedusaHeadsConfig, vocabulary_K: Tensor | None = None
    ):
        super().__init__(architecture, lm.n_layers, taps=[], deep_tap=lm.n_layers)
        size = lm.config.hidden_size
        count = architecture.heads
        n_heads = count if architecture.own_head else 0
        bias = architecture.bias
        self.blocks = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(count))
        self.heads = nn.ModuleList(base.new_head(lm, vocabulary_K) for _ in range(n_heads))

    def start_from(self, lm: TargetModel, vocabulary_K: Tensor | None = None) -> Self:
        """Initialize every head as the target's."""
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        for head in self.own_heads():
            base.copy_head(head, lm, vocabulary_K)
        return self

    def forward(self, h_BND: Tensor, index: int) -> Tensor:
        """The states that head `index`, counted from 0, reads."""
        return F.silu(self.blocks[index](h_BND)) + h_BND

    def states(self, taps: Taps, deep_BTD: Tensor, meta: ForwardMeta, steps: int) -> list[Tensor]:
        """See `Trainable.states`; draft step k is head k on the state k tokens earlier."""
        states = []
        for index in range(steps):
            deep_BTD = shift_right(deep_BTD, meta.positions_RT)
            states.append(self(deep_BTD, index))
        return states

    def own_heads(self) -> list[nn.Module]:
        return list(self.heads)

    def tally(
        self, heads: Sequence[DraftHead], states: Sequence[Tensor], valid: Tensor, top_M: Tensor
    ) -> Tensor:
        """How often each guess of a head is right, and the number of positions, `[H, G + 1]`."""
        rows = []
        for step, (state_MD, valid_M) in enumerate(zip(states, valid, strict=True)):
            head = heads[min(step, len(heads) - 1)]
            right_G = torch.zeros(GUESSES)
            chunks = (x[valid_M].split(CHUNK) for x in (state_MD, top_M))
            for state_CD, top_C in zip(*chunks, strict=True):
                guessed_CG = head.token_of(head(state_CD).topk(GUESSES).indices)
                right_G += (guessed_CG == top_C[:, None]).sum(0).cpu()
            rows.append(torch.cat([right_G, valid_M.sum()[None].cpu()]))
        return torch.stack(rows)

    def facts(self, tally: Tensor) -> dict[str, Any]:
        """`guesses[k][i]` is how often, as a share, guess i of head k (from 0 on) was the target's
        choice on held-out texts. The drafter makes its tree of it."""
        return {"guesses": (tally[:, :-1] / tally[:, -1:]).tolist()}
