"""The rows being decoded: their tokens, lengths and limits, and how a verdict is committed.

Shapes: B rows, S slots a row, P = 1 + the draft's largest depth, E tokens that end a text.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kangaroo.engine.budget import Budget
from kangaroo.engine.cache import KVCache, Tensors
from kangaroo.engine.sampling import Sampling, settings, together
from kangaroo.engine.tree import Draft, Verdict


class RowTensors(NamedTuple):
    """What the device knows of all rows: committed tokens, and their limit; whether an EOS ends the
    text, and which tokens are one; how tokens are chosen, as of `BatchSampling`."""

    length_B: Tensor
    limit_B: Tensor
    seeds_B: Tensor
    done_B: Tensor
    heeds_eos_B: Tensor
    eos_ids_E: Tensor
    settings_B3: Tensor


class Emitted(NamedTuple):
    """What one step wrote, still on the device: the new tokens of each row, of which so many count,
    0 where the row was done; how many were drafted; the draft's valid nodes; whether the text has
    ended."""

    tokens_BP: Tensor
    counts_B: Tensor
    accepted_B: Tensor
    drafted_B: Tensor
    done_B: Tensor

    def to_host(self) -> list[tuple[list[int], int, int]]:
        """(new tokens, accepted, drafted) of each row: the step's one device-to-host copy."""
        numbers_B3 = torch.stack([self.counts_B, self.accepted_B, self.drafted_B], 1)
        rows = torch.cat([numbers_B3, self.tokens_BP], 1).tolist()
        return [(row[3 : 3 + row[0]], row[1], row[2]) for row in rows]


class Batch:
    """Rows of different length in one cache, until another prompt takes their place.

    The last committed token of a row is *pending*: it is in no cache yet, and it is the root of the
    next draft. Slots from `length - 1` up are scratch.

    Args:
        longest: tokens of the longest text, prompt included.
        sampling: of texts that have none of their own.
    """

    def __init__(
        self,
        cache: KVCache,
        longest: int,
        sampling: Sampling,
        eos_ids: frozenset[int],
        device: torch.device,
        budget: Budget,
    ):
        size = self.size = cache.batch_size
        self.n_slots = cache.n_slots
        self.cache, self.longest, self.budget = cache, longest, budget
        self.tokens_BS = torch.zeros(size, self.n_slots, dtype=torch.long, device=device)
        self.length_B = torch.ones(size, dtype=torch.long, device=device)
        self.limit_B, self.seeds_B = self.length_B.clone(), self.length_B.clone()
        self.done_B = torch.ones(size, dtype=torch.bool, device=device)
        self.eos_ids, self.heeds_eos_B = eos_ids, self.done_B.clone()
        self.eos_ids_E = torch.tensor(sorted(eos_ids), dtype=torch.long, device=device)
        # the host's copies, so that extents and drafters that read the text need no sync
        self.ends: list[frozenset[int]] = [eos_ids] * size  # what ends each row's text
        self.texts: list[list[int]] = [[0] for _ in range(size)]
        self.limits, self.seeds, self.done = [1] * size, [0] * size, [True] * size
        self.whole = [False] * size  # whether a row's prompt was read to its end
        # how many likeliest tokens after every verified node a drafter wants, which says so in its
        # `begin`; the nodes' tokens and these, of each row, which it empties
        self.likeliest = 0
        self.verified: list[list[tuple[int, list[int]]]] = [[] for _ in range(size)]
        self.default = replace(sampling, seed=0)
        self.samplings, self.alike = [self.default] * size, True
        self.settings_B3 = torch.tensor([settings(self.default)] * size, device=device)
        self.sampling = together([self.default], self.settings_B3)  # of all rows

    @property
    def rows(self) -> RowTensors:
        return RowTensors(*(getattr(self, name) for name in RowTensors._fields))

    @property
    def draws(self) -> Tensors:
        """Lengths, seeds, settings: what tokens are drawn by."""
        return self.length_B, self.seeds_B, self.settings_B3

    @property
    def active(self) -> list[int]:
        """Rows whose text is being written."""
        return [row for row, done in enumerate(self.done) if not done]

    @property
    def lengths(self) -> list[int]:
        """The host's copy of `length_B`."""
        return list(map(len, self.texts))

    @property
    def used(self) -> int:
        """The largest length of any row."""
        return max(self.lengths)

    @property
    def base_B(self) -> Tensor:
        """Slot and position of each row's pending token."""
        return self.length_B - 1

    def last(self, count: int) -> Tensor:
        """The last `count` committed tokens of each row, `[B, count]`; before the start, any."""
        index = self.length_B[:, None] + torch.arange(-count, 0, device=self.length_B.device)
        return self.tokens_BS.gather(1, index.clamp(min=0))

    def commit(self, emitted: Emitted) -> None:
        """Append what a step wrote, on the device."""
        new_BP = emitted.tokens_BP
        index_BP = self.length_B[:, None] + torch.arange(new_BP.shape[1], device=new_BP.device)
        self.tokens_BS.scatter_(1, index_BP, new_BP)  # what lies beyond the count is scratch
        self.length_B = self.length_B + emitted.counts_B
        self.done_B = emitted.done_B

    def append(self, row: int, tokens: list[int]) -> None:
        """The same on the host."""
        text = self.texts[row]
        text += tokens
        ended = len(text) >= self.limits[row] or (bool(tokens) and tokens[-1] in self.ends[row])
        self.done[row] = self.done[row] or ended

    @torch.inference_mode()
    def stop(self, row: int) -> None:
        """A row's text ends here, though neither EOS nor its limit was reached."""
        self.done_B[row] = self.done[row] = True

    def shared(self, row: int, prompt: Sequence[int]) -> int:
        """How many of a prompt's first tokens a row's text begins with, but for the text's last
        two, which some drafters have not read, and the prompt's last, which gives the next one."""
        if not self.whole[row]:
            return 0
        text, most = self.texts[row], min(len(self.texts[row]) - 2, len(prompt) - 1)
        return next((i for i in range(most) if text[i] != prompt[i]), max(most, 0))


def emitted(draft: Draft, verdict: Verdict, rows: RowTensors) -> Emitted:
    """The accepted path and the bonus token of each row, cut at EOS and at its limit."""
    steps_P = torch.arange(draft.tree.max_depth + 1, device=rows.length_B.device)
    # what the target writes after each accepted node: the next one's token, at last the bonus
    new_BP = verdict.choice_BN.gather(1, verdict.path_BP)
    counts_B = torch.minimum(verdict.count_B + 1, rows.limit_B - rows.length_B)
    is_eos_BP = torch.isin(new_BP, rows.eos_ids_E) & rows.heeds_eos_B[:, None]
    is_eos_BP &= steps_P < counts_B[:, None]
    first_eos_B = torch.where(is_eos_BP.any(1), is_eos_BP.int().argmax(1) + 1, counts_B)
    counts_B = first_eos_B * ~rows.done_B
    ended_B = is_eos_BP.any(1) | (rows.length_B + counts_B >= rows.limit_B)
    accepted_B = torch.minimum(verdict.count_B, counts_B)
    drafted_B = (draft.valid_BN.sum(1) - 1) * ~rows.done_B
    return Emitted(new_BP, counts_B, accepted_B, drafted_B, rows.done_B | ended_B)
