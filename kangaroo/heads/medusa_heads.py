"""Medusa's heads: each reads the target's final state and guesses a token further ahead.

`Head_k(SiLU(W_k h) + h)` for k = 1, ..., where h is the normed final state of the last token in the
cache: the target's own head says what follows it, and Medusa's k-th what comes k tokens after that
(Medusa-1, arXiv 2401.10774, section 2.1).

Shapes: B rows, T tokens, N tokens of a block, M positions, C of them in a chunk, G guesses, D
hidden size, K draft vocabulary.
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
from kangaroo.heads.base import Trainable
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import before
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Layers

GUESSES = 10  # of each head, of which the drafter's tree takes the best
CHUNK = 256  # positions whose logits exist at a time


@dataclass
class MedusaHeadsConfig(base.HeadConfig):
    """How many tokens ahead they guess, and whether by LM heads of their own, begun as the
    target's, instead of the target's."""

    heads: Layers = 4
    own_head: bool = True

    drafter: ClassVar[str] = "medusa"

    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "MedusaHeads":
        return MedusaHeads(lm, self, vocabulary_K)

    def fixed_exit(self, lm: TargetModel) -> int:
        return lm.n_layers  # they read what the target's own head reads

    @property
    def own_steps(self) -> int:
        return self.heads

    def passes(self, steps: int) -> int:
        return 1  # they share nothing: each takes its own step


class MedusaHeads(Trainable):
    """Trained on a frozen target, saved and loaded as an adapter is; see `HeadConfig.build`."""

    architecture: MedusaHeadsConfig

    def __init__(
        self, lm: TargetModel, architecture: MedusaHeadsConfig, vocabulary_K: Tensor | None = None
    ):
        super().__init__(architecture, lm.n_layers, taps=[], deep_tap=lm.n_layers)
        size, count = lm.config.hidden_size, architecture.heads
        own_heads = count if architecture.own_head else 0
        self.blocks = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(count))
        self.heads = nn.ModuleList(base.new_head(lm, vocabulary_K) for _ in range(own_heads))

    def start_from(self, lm: TargetModel, vocabulary_K: Tensor | None = None) -> Self:
        """Every head begins as the target's own."""
        for block in self.blocks:
            nn.init.zeros_(block.get_parameter("weight"))
        for head in self.own_heads():
            base.copy_head(head, lm, vocabulary_K)
        return self

    def forward(self, h_BND: Tensor, index: int) -> Tensor:
        """What head `index`, counted from 0, reads at each token."""
        return F.silu(self.blocks[index](h_BND)) + h_BND

    def states(self, taps: Taps, deep_BTD: Tensor, meta: ForwardMeta, steps: int) -> list[Tensor]:
        """Head k stands k tokens earlier, as draft step k of an adapter does."""
        states = []
        for index in range(steps):
            deep_BTD = before(deep_BTD, meta.positions_RT)
            states.append(self(deep_BTD, index))
        return states

    def own_heads(self) -> list[nn.Module]:
        return list(self.heads)

    def tally(
        self, heads: Sequence[DraftHead], states: Sequence[Tensor], valid: Tensor, top_M: Tensor
    ) -> Tensor:
        """`[H, GUESSES + 1]`: how often each guess of each head is right, and of how many."""
        rows = []
        for step, (state_MD, drafted_M) in enumerate(zip(states, valid, strict=True)):
            head, right_G = heads[min(step, len(heads) - 1)], torch.zeros(GUESSES)
            chunks = (x[drafted_M].split(CHUNK) for x in (state_MD, top_M))
            for state_CD, top_C in zip(*chunks, strict=True):
                guessed_CG = head.token_of(head(state_CD).topk(GUESSES).indices)
                right_G += (guessed_CG == top_C[:, None]).sum(0).cpu()
            rows.append(torch.cat([right_G, drafted_M.sum()[None].cpu()]))
        return torch.stack(rows)

    def facts(self, tally: Tensor) -> dict[str, Any]:
        """`guesses[k][i]`: the share of held-out positions at which guess i of head k (both counted
        from 0) was the target's choice; the drafter's tree is made from it."""
        return {"guesses": (tally[:, :-1] / tally[:, -1:]).tolist()}
