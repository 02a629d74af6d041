"""The head that a drafter reads tokens from, over the whole vocabulary or a part of it, which may
follow the texts: what is rare elsewhere comes again where it stood.

Shapes: B rows, N tokens of a block, M tokens, D hidden size, K draft vocabulary, V vocabulary, R
rank of a table, or room for the largest draft vocabulary.
"""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from kangaroo.engine.sampling import BatchSampling, candidates
from kangaroo.models.target import TargetModel

ROOM = 512  # for tokens of the texts, beside the frequent ones
BLOCK = 16  # rows of a matrix that native code multiplies together


class DraftHead:
    """Logits over the draft vocabulary, by rows of the target's head or by an adapter's own head.
    Drafting from the frequent tokens alone, which are given in ascending order, reads that part of
    the head only (FR-Spec, arXiv 2502.14856)."""

    def __init__(
        self, lm: TargetModel, own_head: nn.Module | None = None, vocabulary_K: Tensor | None = None
    ):
        self.weight_KD: Tensor
        self.device, self.vocab_size = lm.device, lm.config.vocab_size
        self.vocabulary_K = None if vocabulary_K is None else vocabulary_K.to(lm.device)
        if own_head is not None:
            self.weight_KD = own_head.get_parameter("weight")
        elif vocabulary_K is None:
            self.weight_KD = lm.head.weight
        else:  # gathered once: a copy of this part alone, in memory alone
            self.weight_KD = lm.head.weight[vocabulary_K.to(lm.head.weight.device)]
        self.table_KR: Tensor | None = None  # for the last R numbers of each state, if it has them
        self.finish = lm.finish_logits
        self.native: Any = None  # `native.Head`, or that of `kangaroo.cuda.layers`
        self.chooses = False

    @property
    def size(self) -> int:
        """Tokens to draft from."""
        return len(self.weight_KD)

    @property
    def weights(self) -> list[Tensor]:
        """All that is read for a token."""
        return [x for x in (self.weight_KD, self.table_KR) if x is not None]

    def accelerate(self, lm: TargetModel) -> Self:
        """Draft in native code, or in kernels, if the target decodes in it."""
        self.native = lm.acceleration.part("Head", self.weight_KD)
        self.chooses = lm.acceleration.kernels is not None
        return self

    def follow(self, texts: Sequence[list[int]]) -> bool:
        """Take note of which texts are decoded; whether the draft vocabulary is another now."""
        return False

    def __call__(self, adapted_MD: Tensor) -> Tensor:
        """`[M, K]` logits of adapted states; in float32 from native code."""
        if self.native and self.native.takes(adapted_MD):
            return self.native(adapted_MD)
        size = self.weight_KD.shape[1]
        logits_MK = F.linear(adapted_MD[:, :size].to(self.weight_KD), self.weight_KD)
        if self.table_KR is not None:
            near_MK = F.linear(adapted_MD[:, size:].to(self.table_KR), self.table_KR)
            logits_MK = logits_MK + near_MK.to(logits_MK)
        return self.finish(logits_MK).to(self.device)

    def choose(self, adapted_MD: Tensor) -> tuple[Tensor, Tensor] | None:
        """The likeliest token of each and its chance, both `[M, 1]`; see `TargetModel.choose`."""
        if not self.chooses:
            return None
        return self.native.choose(adapted_MD[:, None], None, self.vocabulary_K)

    def token_of(self, index: Tensor) -> Tensor:
        """Token ids of places in the draft vocabulary."""
        return index if self.vocabulary_K is None else self.vocabulary_K[index]

    def spread(self, logits_MK: Tensor) -> Tensor:
        """The same logits as `[M, V]`: -inf outside the draft vocabulary."""
        if self.vocabulary_K is None:
            return logits_MK
        logits_MV = logits_MK.new_full((len(logits_MK), self.vocab_size), -torch.inf)
        return logits_MV.index_copy_(1, self.vocabulary_K, logits_MK)

    def candidates(
        self,
        logits_BNK: Tensor,
        at_BN: Tensor,
        sampling: BatchSampling,
        seeds_B: Tensor,
        count: int,
    ) -> Tensor:
        """Those of `sampling.candidates` for these logits, `[B, N, count]`."""
        if sampling.greedy:
            return self.token_of(logits_BNK.topk(count).indices)
        logits_BNV = self.spread(logits_BNK.flatten(0, 1)).unflatten(0, logits_BNK.shape[:2])
        return candidates(logits_BNV, at_BN, sampling, seeds_B, count)


class TextHead(DraftHead):
    """Drafts from the frequent tokens, given in ascending order, and from up to `room` others that
    the texts have: nearly all of what the whole head would bring, for 1% of its rows
    (docs/methods.md). CUDA graphs are of one size, so there all of the room is filled."""

    def __init__(self, lm: TargetModel, frequent_K: Tensor, room: int = ROOM):
        super().__init__(lm, None, frequent_K)
        self.target_VD, self.frequent = lm.head.weight, frozenset(frequent_K.tolist())
        self.fills_all = False
        self.make_room(room)

    def make_room(self, room: int) -> None:
        """For so many other tokens, of which there is none yet."""
        assert self.vocabulary_K is not None
        self.room, size, free = room, len(self.frequent), -(-room // BLOCK) * BLOCK
        ids_K, rows_KD = self.vocabulary_K[:size], self.weight_KD[:size]
        self.ids_R = torch.cat([ids_K, ids_K.new_empty(free)])
        self.rows_RD = torch.cat([rows_KD, rows_KD.new_empty(free, rows_KD.shape[1])])
        rare = (token for token in range(self.vocab_size) if token not in self.frequent)
        self.filling = list(islice(rare, 2 * free))  # at most half of them are a text's, too
        # each text, how much of it was read, and its rare tokens in their order
        self.texts = list[tuple[list[int], int, dict[int, None]]]()
        self._grow([])

    def accelerate(self, lm: TargetModel) -> Self:
        self.fills_all = lm.acceleration.graphs is not None
        self._grow([])
        return super().accelerate(lm)

    def follow(self, texts: Sequence[list[int]]) -> bool:
        known = {id(text): (read, rare) for text, read, rare in self.texts}
        if [*map(id, texts)] == [*known]:
            return False
        self.texts = []
        for text in texts:
            read, rare = known.get(id(text), (0, {}))
            new = {token: None for token in text[read:] if token not in self.frequent}
            self.texts.append((text, len(text), rare | new))
        others = dict.fromkeys(chain.from_iterable(rare for *_, rare in self.texts))
        self._grow(list(others)[: self.room])
        return True

    def _grow(self, others: list[int]) -> None:
        """Draft from these besides; their last block of rows is filled up with any of the rest."""
        first, own = len(self.frequent), {*others}
        free = len(self.ids_R) - first - len(others) if self.fills_all else -len(others) % BLOCK
        others = [*others, *islice((token for token in self.filling if token not in own), free)]
        end = first + len(others)
        self.ids_R[first:end] = torch.tensor(others, dtype=torch.long)
        self.rows_RD[first:end] = self.target_VD[others]
        self.vocabulary_K, self.weight_KD = self.ids_R[:end], self.rows_RD[:end]
        if self.native is not None and not self.fills_all:
            self.native.weight_OD = self.weight_KD
