"""The block head: an adapter that computes the states of a whole draft in one pass.

For every further place of the draft it reads the exit state of the pending token again, plus a
learned vector for the place. Places attend to the text and to the places before them. The previous
token enters once it is chosen, through a low-rank table: `logits = Head(state) + Table(Before(the
previous token's embedding))`. After P-EAGLE (arXiv 2602.01469) and DSpark (arXiv 2607.05147).

Shapes: B rows, N tokens of a block, T tokens of a text, D hidden size, K draft vocabulary, R rank.
"""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from kangaroo.engine.cache import ForwardMeta, Taps
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.base import new_head
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import shift_right
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, DraftSize


@dataclass
class BlockHeadConfig(AdapterHeadConfig):
    """An adapter's parts, and those of a block."""

    places: DraftSize = 6  # the longest draft, in tokens
    rank: Count = 32  # of the table by which the previous token moves the logits

    drafter: ClassVar[str] = "block"

    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "BlockHead":
        return BlockHead(lm, exit_layer, self, vocabulary_K)

    @property
    def fixed_steps(self) -> int:
        return self.places


class BlockHead(Adapter):
    """An adapter whose states from the second place on are `[B, N, D + R]`: the last R numbers are
    the table's input, for the second draft head. See `HeadConfig.build`."""

    architecture: BlockHeadConfig

    def __init__(
        self,
        lm: TargetModel,
        exit_layer: int,
        architecture: BlockHeadConfig,
        vocabulary_K: Tensor | None,
    ):
        super().__init__(lm, exit_layer, architecture, vocabulary_K)
        self.taps = 0, exit_layer  # the embeddings, too
        self.places = nn.Parameter(torch.zeros(architecture.places - 1, lm.config.hidden_size))
        self.before = nn.Linear(lm.config.hidden_size, architecture.rank, bias=False)
        self.table = new_head(lm, vocabulary_K, architecture.rank)

    def start_from(self, lm: TargetModel, vocabulary_K: Tensor | None = None) -> Self:
        """Initialize an adapter that ignores previous tokens and treats all places as the first."""
        super().start_from(lm, vocabulary_K)
        nn.init.zeros_(self.table.weight)
        return self

    def own_heads(self) -> list[nn.Module]:
        return [*super().own_heads(), self.table]

    def draft_heads(self, lm: TargetModel, vocabulary_K: Tensor | None) -> list[DraftHead]:
        """One head for the first place and one for all others, with the same rows."""
        first = DraftHead(lm, self.head, vocabulary_K)
        further = copy.copy(first)
        further.table_KR = self.table.weight
        return [first, further]

    def neighbours(self, embedded_XD: Tensor) -> Tensor:
        """The table's inputs `[X, R]` for tokens X. Embeddings are small, so they are normed."""
        return self.before(F.rms_norm(embedded_XD, embedded_XD.shape[-1:]))

    def add_places(
        self, f_BND: Tensor, deep_BND: Tensor | None, count: int
    ) -> tuple[Tensor, Tensor | None]:
        """Append `count` further places to the inputs of `forward`."""
        f_BND = torch.cat([f_BND, f_BND[:, -1:] + self.places[:count]], 1)
        if deep_BND is not None:
            deep_BND = torch.cat([deep_BND, deep_BND[:, -1:].expand(-1, count, -1)], 1)
        return f_BND, deep_BND

    def states(self, taps: Taps, deep_BTD: Tensor, meta: ForwardMeta, steps: int) -> list[Tensor]:
        """See `Trainable.states`; draft step k is place k."""
        past = self.draft_steps(meta)
        f_BTD = taps[self.exit_layer]
        positions_RT = meta.positions_RT
        deep_BTD = shift_right(deep_BTD, positions_RT)
        states = [self(f_BTD, deep_BTD, meta, past)]
        neighbours_BTR = self.neighbours(taps[0])
        for step in range(2, steps + 1):
            f_BTD = shift_right(f_BTD, positions_RT)
            deep_BTD = shift_right(deep_BTD, positions_RT)
            state_BTD = self(f_BTD + self.places[step - 2], deep_BTD, meta, past)
            states.append(torch.cat([state_BTD, neighbours_BTR], -1))
        return states
