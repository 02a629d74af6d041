"""A draft head that follows the texts: what is rare elsewhere comes again where it stood.

Shapes: K draft vocabulary, V vocabulary, D hidden size, R room for the largest draft vocabulary.
"""

from collections.abc import Sequence
from itertools import chain, islice

import torch
from torch import Tensor
from typing_extensions import Self

from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel

ROOM = 512  # for tokens of the texts
BLOCK = 16  # rows of a matrix that native code multiplies together


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
