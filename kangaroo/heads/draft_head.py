"""A drafter's LM head, over the whole vocabulary or a part of it that may follow the texts.

Shapes: B rows, N tokens of a block, M tokens, D hidden size, K draft vocabulary, V vocabulary, R
rank of a table, or room for the largest draft vocabulary.
"""

from collections.abc import Sequence
from itertools import chain, islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from kangaroo.engine.backend import Chosen, Head
from kangaroo.engine.sampling import BatchSampling, candidates
from kangaroo.models.packed import weight_rows
from kangaroo.models.target import TargetModel

ROOM = 512  # most tokens of the texts besides the frequent ones
BLOCK = 16  # rows of a matrix that native code multiplies together


class DraftHead:
    """Logits over the draft vocabulary, by the target's head or an adapter's own. With only
    frequent tokens, in ascending order, fewer rows are read (FR-Spec, arXiv 2502.14856). With a
    `norm` it norms states first."""

    def __init__(
        self,
        lm: TargetModel,
        own_head: nn.Module | None = None,
        vocabulary_K: Tensor | None = None,
        norm: nn.Module | None = None,
    ):
        self.device = lm.device
        self.vocab_size = lm.config.vocab_size
        self.vocabulary_K = None if vocabulary_K is None else vocabulary_K.to(lm.device)
        if own_head is not None:
            self.weight_KD: Tensor = own_head.get_parameter("weight")
        else:  # a copy, if it is a part of the vocabulary
            self.weight_KD = weight_rows(lm.head, self.vocabulary_K)
        self.table_KR: Tensor | None = None  # multiplies the last R numbers of each state
        self.finish = lm.finish_logits
        self.norm = norm or nn.Identity()
        self.norm_D = None if norm is None else norm.get_parameter("weight")
        self.fast: Head | None = None  # a backend's

    @property
    def size(self) -> int:
        return len(self.weight_KD)

    @property
    def weights(self) -> list[Tensor]:
        """The weights that are read for every token."""
        return [x for x in (self.weight_KD, self.table_KR, self.norm_D) if x is not None]

    def accelerate(self, lm: TargetModel) -> Self:
        self.fast = lm.backend.head(self.weight_KD)
        return self

    def follow(self, texts: Sequence[list[int]]) -> bool:
        """Follow the texts that are being written; true if the draft vocabulary changed."""
        return False

    def __call__(self, adapted_MD: Tensor) -> Tensor:
        """Logits `[M, K]` of adapted states `[M, D]`; in float32 from a compiled backend."""
        adapted_MD = self.norm(adapted_MD)
        if self.fast and self.fast.takes(adapted_MD):
            return self.fast(adapted_MD)
        size = self.weight_KD.shape[1]
        logits_MK = F.linear(adapted_MD[:, :size].to(self.weight_KD), self.weight_KD)
        if self.table_KR is not None:
            table_MK = F.linear(adapted_MD[:, size:].to(self.table_KR), self.table_KR)
            logits_MK = logits_MK + table_MK.to(logits_MK)
        return self.finish(logits_MK).to(self.device)

    def choose(self, adapted_MD: Tensor) -> Chosen | None:
        """As `TargetModel.choose`, both `[M, 1]`."""
        if self.fast is None:
            return None
        return self.fast.choose(self.norm(adapted_MD)[:, None], ids_O=self.vocabulary_K)

    def token_of(self, index: Tensor) -> Tensor:
        """The token ids of indices into the draft vocabulary."""
        return index if self.vocabulary_K is None else self.vocabulary_K[index]

    def spread(self, logits_MK: Tensor) -> Tensor:
        """The logits over the whole vocabulary, `[M, V]`: -inf outside the draft vocabulary."""
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
        """As `sampling.candidates`, from logits over the draft vocabulary; `[B, N, count]`."""
        if sampling.greedy:
            return self.token_of(logits_BNK.topk(count).indices)
        logits_BNV = self.spread(logits_BNK.flatten(0, 1)).unflatten(0, logits_BNK.shape[:2])
        return candidates(logits_BNV, at_BN, sampling, seeds_B, count=count)


class TextHead(DraftHead):
    """Drafts from frequent tokens, ascending, and up to `room` rare ones of the texts: nearly as
    good as the whole head, with 1% of its rows (docs/methods.md). CUDA graphs fill all the room."""

    def __init__(self, lm: TargetModel, frequent_K: Tensor, room: int = ROOM):
        super().__init__(lm, None, frequent_K)
        self.target_head = lm.head
        self.frequent = frozenset(frequent_K.tolist())
        self.fills_room = False
        self.make_room(room)

    def make_room(self, room: int) -> None:
        """Allow up to `room` rare tokens, and start without any."""
        assert self.vocabulary_K is not None
        self.room = room
        free = -(-room // BLOCK) * BLOCK
        self.ids_R = F.pad(self.vocabulary_K[: len(self.frequent)], (0, free))
        self.rows_RD = F.pad(self.weight_KD[: len(self.frequent)], (0, 0, 0, free))
        rare = (token for token in range(self.vocab_size) if token not in self.frequent)
        self.fillers = list(islice(rare, 2 * free))  # at most half of these are in the texts, too
        # each text, how many of its tokens were read, and its rare tokens in their order
        self.texts = list[tuple[list[int], int, dict[int, None]]]()
        self._add_rare({})

    def accelerate(self, lm: TargetModel) -> Self:
        self.fills_room = lm.backend.records
        self._add_rare({})
        return super().accelerate(lm)

    def follow(self, texts: Sequence[list[int]]) -> bool:
        followed = {id(text): (n_read, rare) for text, n_read, rare in self.texts}
        if [*map(id, texts)] == [*followed]:
            return False
        self.texts = []
        for text in texts:
            n_read, rare = followed.get(id(text), (0, {}))
            new = {token: None for token in text[n_read:] if token not in self.frequent}
            self.texts.append((text, len(text), rare | new))
        tokens = dict.fromkeys(chain.from_iterable(rare for *_, rare in self.texts))
        self._add_rare(dict.fromkeys(islice(tokens, self.room)))
        return True

    def _add_rare(self, tokens: dict[int, None]) -> None:
        """Draft from the frequent and these rare tokens, with fillers up to a whole block."""
        start = len(self.frequent)
        free = len(self.ids_R) - start - len(tokens) if self.fills_room else -len(tokens) % BLOCK
        fillers = islice((token for token in self.fillers if token not in tokens), free)
        ids = [*tokens, *fillers]
        end = start + len(ids)
        self.ids_R[start:end] = torch.tensor(ids, dtype=torch.long)
        self.rows_RD[start:end] = weight_rows(self.target_head, self.ids_R[start:end])
        self.vocabulary_K = self.ids_R[:end]
        self.weight_KD = self.rows_RD[:end]
        if self.fast is not None and not self.fills_room:
            self.fast.read(self.weight_KD)
