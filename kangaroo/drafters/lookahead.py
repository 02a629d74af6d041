"""Lookahead: a Jacobi window fills a pool of n-grams, of which fitting ones are verified beside it.

Shapes: B rows, N draft nodes or tokens of an n-gram, W columns and J = `ngram` - 1 levels of the
window, P n-grams of the pool, G guesses.
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

POOL_SIZE = 4096  # n-grams of a row, those of the prompt included


@dataclass
class LookaheadConfig(DrafterConfig):
    """Lookahead decoding (arXiv 2402.02057). Beside the pending token, a round verifies
    (window + guesses) * (ngram - 1) nodes.

    Args:
        window: positions ahead of the text that are guessed in parallel (the paper's W).
        ngram: tokens of an n-gram (N).
        guesses: n-grams to verify in a round (G), the newest that start with the pending token.
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
        """The nodes of a round, without the pending token."""
        return (self.window + self.guesses) * (self.ngram - 1)

    def build(self, lm: TargetModel) -> Drafter:
        return Lookahead(self)


class Lookahead(Drafter):
    """Level j of the window holds a token in each column, for the position j + 1 after the pending
    token and for the following ones. Level 0 is a chain, and each column hangs below its token
    there. The target's choices after the last level complete an n-gram in each column and are the
    new last level; the first one is dropped. A row's window and pool depend on its text alone."""

    def __init__(self, options: LookaheadConfig):
        self.options = options
        self.levels = options.ngram - 1
        self.max_nodes = options.nodes

    def begin(self, batch: Batch) -> None:
        options = self.options
        self.tree = topology(options.window, self.levels, options.guesses, batch.length_B.device)
        self.window_BJW = batch.length_B.new_zeros(batch.size, self.levels, options.window)
        # the newest first; -1 in free places
        self.pool_BPN = batch.length_B.new_full((batch.size, POOL_SIZE, options.ngram), -1)
        self.rows = RowStates(self._start)
        self.proposed: Draft | None = None

    def propose(self, batch: Batch) -> Draft:
        for row, text in enumerate(batch.texts):
            self.rows.get(row, text)
        pending_B1 = batch.last(1)
        guesses = self.options.guesses
        index_P = torch.arange(POOL_SIZE, device=pending_B1.device)
        index_BP = torch.where(self.pool_BPN[..., 0] == pending_B1, index_P, POOL_SIZE)
        index_BG = index_BP.topk(guesses, largest=False, sorted=True).values
        hit_BG = index_BG < POOL_SIZE
        index_BGJ = (index_BG * hit_BG)[..., None].expand(-1, -1, self.levels)
        # padding must be in the vocabulary, too
        guess_BGJ = self.pool_BPN[..., 1:].gather(1, index_BGJ).clamp(min=0)
        tokens_BN = torch.cat([pending_B1, self.window_BJW.flatten(1), guess_BGJ.flatten(1)], 1)
        valid_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        valid_BN[:, -guesses * self.levels :] = hit_BG[..., None].expand_as(guess_BGJ).flatten(1)
        self.proposed = Draft(tokens_BN, self.tree, valid_BN)
        return self.proposed

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Taps) -> None:
        if draft is not self.proposed:  # another drafter's nodes: not those of the window
            return
        last = 1 + (self.levels - 1) * self.options.window
        new_BW = verdict.choice_BN[:, last : last + self.options.window]
        levels_BNW = torch.cat([self.window_BJW, new_BW[:, None]], 1)
        self.pool_BPN = add_ngrams(self.pool_BPN, levels_BNW.transpose(1, 2))
        self.window_BJW = levels_BNW[:, 1:]

    def _start(self, row: int, text: list[int]) -> None:
        options = self.options
        device = self.window_BJW.device
        width = options.window + self.levels - 1
        tail = (text * (1 + width // len(text)))[-width:]
        self.window_BJW[row] = torch.tensor(tail, device=device).unfold(0, options.window, 1)
        ngrams = list(zip(*(text[i:] for i in range(options.ngram)), strict=False))
        newest = list(dict.fromkeys(reversed(ngrams)))[:POOL_SIZE]
        self.pool_BPN[row] = -1
        if newest:
            self.pool_BPN[row, : len(newest)] = torch.tensor(newest, device=device)


def add_ngrams(pool_BPN: Tensor, ngrams_BWN: Tensor) -> Tensor:
    """The pool, as long as before, with new n-grams in front, the last first, and no duplicates."""
    size = pool_BPN.shape[1]
    n_new = ngrams_BWN.shape[1]
    pool_BPN = torch.cat([ngrams_BWN.flip(1), pool_BPN], 1)
    equal_BPW = (pool_BPN[:, :, None] == pool_BPN[:, None, :n_new]).all(-1)
    keep_BP = (pool_BPN[..., 0] >= 0) & ~equal_BPW.tril(-1).any(-1)  # equals no newer one
    place_BP = torch.where(keep_BP, keep_BP.cumsum(1) - 1, size).clamp(max=size)
    ordered_BPN = torch.full_like(pool_BPN[:, : size + 1], -1)  # dropped ones take the last place
    ordered_BPN.scatter_(1, place_BP[..., None].expand_as(pool_BPN), pool_BPN)
    return ordered_BPN[:, :size]


@lru_cache(maxsize=16)
def topology(window: int, levels: int, guesses: int, device: torch.device) -> Tree:
    """The root, the window level by level, then the guesses one by one."""
    parents = [0, *range(window)]  # level 0 is a chain
    parents += range(1, 1 + (levels - 1) * window)  # one level before
    first = len(parents)
    parents += [first + i - 1 if i % levels else 0 for i in range(guesses * levels)]
    return Tree(torch.tensor([parents], device=device), max_depth=window + levels - 1)
