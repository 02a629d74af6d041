"""The block head: an adapter that makes the states of a whole draft in one pass.

Beside the exit state of the pending token it reads that state again for every further place, plus a
learnt vector of the place, which attends to the text and to the places before it. The token before
comes in when it is chosen, by a low-rank table of neighbours: `logits = Head(state) +
Table(Before(embedding of the token before))`. After P-EAGLE (2602.01469) and DSpark (2607.05147).

Shapes: B rows, N tokens of a block, T tokens of a text, D hidden size, K draft vocabulary, R rank.
"""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from typing_extensions import Self

from kangaroo.engine.cache import ForwardMeta, Taps
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import at_step, before
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, DraftSize


@dataclass
class BlockHeadConfig(AdapterHeadConfig):
    """An adapter's parts; tokens of the longest draft, the first of which is what an adapter
    drafts; and the rank of the table of neighbours."""

    places: DraftSize = 6
    rank: Count = 32

    drafter: ClassVar[str] = "block"

    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "BlockHead":
        return BlockHead(lm, exit_layer, self, vocabulary_K)

    @property
    def own_steps(self) -> int:
        return self.places


class BlockHead(Adapter):
    """Its states from the second place on are `[B, N, D + R]`, the neighbour's part last, as its
    second draft head reads them; see `HeadConfig.build`."""

    architecture: BlockHeadConfig

    def __init__(
        self,
        lm: TargetModel,
        exit_layer: int,
        architecture: BlockHeadConfig | None = None,
        vocabulary_K: Tensor | None = None,
    ):
        parts = architecture or BlockHeadConfig()
        super().__init__(lm, exit_layer, parts, vocabulary_K)
        self.taps = 0, exit_layer  # the embeddings, too
        size = lm.config.hidden_size
        outputs = lm.config.vocab_size if vocabulary_K is None else len(vocabulary_K)
        self.places = nn.Parameter(torch.zeros(parts.places - 1, size))
        self.before = nn.Linear(size, parts.rank, bias=False)
        self.table = nn.Linear(parts.rank, outputs, bias=False)

    def start_from(self, lm: TargetModel, vocabulary_K: Tensor | None = None) -> Self:
        """Begin as an adapter whose further places are like the first, and have no neighbours."""
        super().start_from(lm, vocabulary_K)
        nn.init.zeros_(self.table.weight)
        return self

    def go_on_from(self, adapter: Adapter) -> Self:
        """Begin with the parts of a trained adapter."""
        self.load_state_dict(adapter.state_dict(), strict=False)
        nn.init.zeros_(self.table.weight)
        return self

    def own_heads(self) -> list[nn.Module]:
        return [*super().own_heads(), self.table]

    def draft_heads(self, lm: TargetModel, vocabulary_K: Tensor | None) -> list[DraftHead]:
        """Of the first place and of all others, on the same rows."""
        first = DraftHead(lm, self.head, vocabulary_K)
        further = copy.copy(first)
        further.table_KR = self.table.weight
        return [first, further]

    def neighbours(self, embedded_XD: Tensor) -> Tensor:
        """What the table reads of any tokens X, `[X, R]`; embeddings are small, and so normed."""
        return self.before(F.rms_norm(embedded_XD, embedded_XD.shape[-1:]))

    def add_places(
        self, f_BND: Tensor, deep_BND: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor | None]:
        """What `forward` reads, with so many further places after the last token."""
        f_BND = torch.cat([f_BND, f_BND[:, -1:] + self.places[:count]], 1)
        if deep_BND is not None:
            deep_BND = torch.cat([deep_BND, deep_BND[:, -1:].expand(-1, count, -1)], 1)
        return f_BND, deep_BND

    def states(self, taps: Taps, deep_BTD: Tensor, meta: ForwardMeta, steps: int) -> list[Tensor]:
        """Place k of the draft that began k - 1 tokens earlier, at every token of the texts."""
        past, f_BTD, positions_RT = DynamicCache(), taps[self.exit_layer], meta.positions_RT
        meta = meta.for_layer(self.windowed)
        deep_BTD = before(deep_BTD, positions_RT)
        states = [self(f_BTD, deep_BTD, meta, past)]
        neighbours_BTR = self.neighbours(taps[0])
        for place in range(1, steps):
            f_BTD, deep_BTD = before(f_BTD, positions_RT), before(deep_BTD, positions_RT)
            at = at_step(meta, place + 1, f_BTD)
            state_BTD = self(f_BTD + self.places[place - 1], deep_BTD, at, past)
            states.append(torch.cat([state_BTD, neighbours_BTR], -1))
        return states
