"""Lookahead: a Jacobi window writes n-grams into a pool, and those that fit are verified beside it.

Shapes: B rows, N draft nodes, W columns of the window, J = `ngram` - 1 levels of it, P n-grams of
the pool, G guesses.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import torch
from torch import Tensor

from kangaroo.drafters.base import Drafter, DrafterConfig, RowStates
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import Taps
from kangaroo.engine.tree import Draft, Tree, Verdict
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import MOST_NODES, DraftSize, Range, check_nodes

POOL = 4096  # n-grams that are kept of a row; those of the prompt are there from the start


@dataclass
class LookaheadConfig(DrafterConfig):
    """Lookahead decoding (arXiv 2402.02057).

    A round verifies (window + guesses) * (ngram - 1) nodes beside the pending token.

    Args:
        window: places ahead of the text that are guessed at a time (the paper's W).
        ngram: tokens of an n-gram (N).
        guesses: n-grams that are verified a round (G), the newest that start with the pending
            token.
    """

    name: str = "lookahead"
    window: DraftSize = 15
    ngram: Annotated[int, Range(2, MOST_NODES)] = 5
    guesses: DraftSize = 15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nodes(self.nodes, window=self.window, guesses=self.guesses, ngram=self.ngram)

    @property
    def nodes(self) -> int:
        """Of a round, the pending token aside."""
        return (self.window + self.guesses) * (self.ngram - 1)

    def build(self, lm: TargetModel) -> Drafter:
        return Lookahead(self)


class Lookahead(Drafter):
    """The window's level j holds tokens j + 1 places after the pending one, and on by column.

    Level 0 is a chain, and each column hangs below its token there. What the target writes after
    the last level completes an n-gram a column, and is the next last level: the levels move down by
    one a round. A row's window and pool are fixed by its text alone."""

    def __init__(self, options: LookaheadConfig):
        self.options, self.levels = options, options.ngram - 1
        self.max_nodes = options.nodes

    def begin(self, batch: Batch) -> None:
        size, options, device = batch.size, self.options, batch.length_B.device
        self.tree = topology(options.window, self.levels, options.guesses, device)
        self.window_BJW = batch.length_B.new_zeros(size, self.levels, options.window)
        # the newest first; -1 where there is none
        self.pool_BPN = batch.length_B.new_full((size, POOL, options.ngram), -1)
        self.rows = RowStates(self._start)
        self.proposed: Draft | None = None

    def propose(self, batch: Batch) -> Draft:
        for row, text in enumerate(batch.texts):
            self.rows.of(row, text)
        pending_B1, guesses = batch.last(1), self.options.guesses
        age_P = torch.arange(POOL, device=pending_B1.device)
        fits_BP = self.pool_BPN[..., 0] == pending_B1
        age_BP = torch.where(fits_BP, age_P, POOL)
        age_BG = age_BP.topk(guesses, largest=False, sorted=True).values
        found_BG = age_BG < POOL
        index_BGJ = (age_BG * found_BG)[..., None].expand(-1, -1, self.levels)
        # where nothing fits the tokens are padding, which has to be of the vocabulary all the same
        guess_BGJ = self.pool_BPN[..., 1:].gather(1, index_BGJ).clamp(min=0)
        window_BM = self.window_BJW.flatten(1)
        found_BM = found_BG[..., None].expand_as(guess_BGJ).flatten(1)
        always_BM = torch.ones_like(window_BM, dtype=torch.bool)
        self.proposed = Draft(
            tokens_BN=torch.cat([pending_B1, window_BM, guess_BGJ.flatten(1)], 1),
            tree=self.tree,
            valid_BN=torch.cat([always_BM[:, :1], always_BM, found_BM], 1),
        )
        return self.proposed

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Taps) -> None:
        proposed, self.proposed = self.proposed, None
        if draft is not proposed:  # another draft was verified, whose nodes are not the window
            return
        last = 1 + (self.levels - 1) * self.options.window
        new_BW = verdict.choice_BN[:, last : last + self.options.window]
        self.window_BJW = torch.cat([self.window_BJW, new_BW[:, None]], 1)
        self.pool_BPN = remember(self.pool_BPN, self.window_BJW.transpose(1, 2))
        self.window_BJW = self.window_BJW[:, 1:]

    def _start(self, row: int, text: list[int]) -> None:
        """Of a text that has taken a row, window and pool."""
        options, device = self.options, self.window_BJW.device
        reach = options.window + self.levels - 1
        tail = (text * (1 + reach // len(text)))[-reach:]
        tail_R = torch.tensor(tail, device=device)
        self.window_BJW[row] = tail_R.unfold(0, options.window, 1)
        grams = list(zip(*(text[i:] for i in range(options.ngram)), strict=False))
        newest = list(dict.fromkeys(reversed(grams)))[:POOL]
        self.pool_BPN[row] = -1
        if newest:
            self.pool_BPN[row, : len(newest)] = torch.tensor(newest, device=device)


def remember(pool_BPN: Tensor, grams_BWN: Tensor) -> Tensor:
    """The pool with new n-grams in front, the last of them first, and none of them twice. Those
    that have been new for longest ago fall out."""
    size, pool_BPN = pool_BPN.shape[1], torch.cat([grams_BWN.flip(1), pool_BPN], 1)
    n_new = grams_BWN.shape[1]
    same_BPW = (pool_BPN[:, :, None] == pool_BPN[:, None, :n_new]).all(-1)
    again_BP = (same_BPW.tril(-1)).any(-1)  # column i is at place i, and newer than those after it
    kept_BP = (pool_BPN[..., 0] >= 0) & ~again_BP
    place_BP = torch.where(kept_BP, kept_BP.cumsum(1) - 1, size).clamp(max=size)
    ordered_BPN = torch.full_like(pool_BPN[:, : size + 1], -1)  # the last place is for what goes
    ordered_BPN.scatter_(1, place_BP[..., None].expand_as(pool_BPN), pool_BPN)
    return ordered_BPN[:, :size]


@lru_cache(maxsize=16)
def topology(window: int, levels: int, guesses: int, device: torch.device) -> Tree:
    """The root, the window level by level, then the guesses one by one."""
    parents = [0, *range(window)]  # level 0 is a chain
    parents += range(1, 1 + (levels - 1) * window)  # a window's width before
    first = len(parents)
    parents += [first + i - 1 if i % levels else 0 for i in range(guesses * levels)]
    return Tree(torch.tensor([parents], device=device), max_depth=window + levels - 1)
