"""Which samples make up each micro-batch: a pure function of the data, the seed and the epoch.

Shapes: B rows, T tokens of a row, M wanted positions, J kept tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kangaroo.data.filters import answers
from kangaroo.engine import topk_logits as teacher
from kangaroo.engine.cache import Block
from kangaroo.models.prompts import Sample
from kangaroo.models.target import LM
from kangaroo.utils.errors import DataError


@dataclass
class Tokens:
    """A micro-batch of rows that hold one sample each, or several one after another.

    Args:
        input_BT: token ids, padded on the right.
        wanted_BT: true where the *next* token was written by the assistant: there, and only there,
            the adapter would have drafted.
        sample_BT: which sample of the micro-batch a token belongs to, -1 for padding; None where a
            row is one sample, whose padding a causal mask hides.
        position_BT: place within the sample; None likewise.
        kept: where the target's distributions were kept, those of the wanted positions, row after
            row: likeliest tokens and their chances, each `[M, J]`.
    """

    input_BT: Tensor
    wanted_BT: Tensor
    sample_BT: Tensor | None = None
    position_BT: Tensor | None = None
    kept: tuple[Tensor, Tensor] | None = None

    def block(self, lm: LM) -> Block:
        """Where the tokens sit: no token sees another sample, and positions restart with each."""
        width = self.input_BT.shape[1]
        if self.sample_BT is None or self.position_BT is None:
            return lm.chunk(0, width, row=0, n_slots=width)
        slots_BT = torch.arange(width, device=self.input_BT.device).expand_as(self.input_BT)
        same_BTT = self.sample_BT[:, :, None] == self.sample_BT[:, None, :]
        seen_BTT = same_BTT & (slots_BT[:, :, None] >= slots_BT[:, None, :])
        rows, rope = slice(0, len(slots_BT)), lm.rope(self.position_BT)
        # boolean: the target and the adapter, which trains in float32, share it
        return Block(slots_BT, self.position_BT, seen_BTT[:, None], width, rows, rope)


def plan(
    lengths: Sequence[int],
    batch_tokens: int,
    seed: int,
    epoch: int,
    packing: bool = False,
    same: int = 0,
) -> list[list[int]]:
    """Micro-batches of at most `batch_tokens` padded tokens (or one sample), in shuffled order.

    Without packing samples of similar length go together, so that little is padding; with it any
    samples do, as many as fit into the rows that `rows_of` makes of them.

    Args:
        same: unless 0, the micro-batches of epoch 0 in another order. The n-th of a step of so many
            is the n-th of another, but for a few, and so stays with the process that remembers it.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    if same and epoch:
        first = plan(lengths, batch_tokens, seed, 0, packing)
        count = len(first)  # epochs follow each other without a gap, wherever steps begin
        order = torch.randperm(count, generator=generator).tolist()
        before = sorted(order, key=lambda i: i % same)
        places = sorted(range(count), key=lambda i: (epoch * count + i) % same)
        return [first[i] for _, i in sorted(zip(places, before, strict=True))]
    # the order within one length is random, else the same samples would meet every epoch
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    if packing:
        return _packed(shuffled, lengths, batch_tokens)
    batches: list[list[int]] = [[]]
    for index in sorted(shuffled, key=lambda i: lengths[i]):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    order = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in order]


def _packed(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    for index in order:
        together = [lengths[i] for i in (*batches[-1], index)]
        if batches[-1] and len(rows_of(together)) * max(together) > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def rows_of(lengths: Sequence[int]) -> list[list[int]]:
    """Which samples share a row as wide as the longest: best fit, the longest first.

    Wider rows would hold a little less padding and cost more, since attention computes the whole
    square of a row, whatever the mask.
    """
    width = max(lengths)
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [row for row in range(len(rows)) if room[row] >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda row: room[row])
            rows[best].append(index)
            room[best] -= lengths[index]
        else:
            rows.append([index])
            room.append(width - lengths[index])
    return rows


def wanted_of(sample: Sample, length: int, kept: bool = False) -> np.ndarray:
    """`[length - 1]`: which of a sample's tokens, from the second on, are learnt: the assistant's,
    but for those whose distribution should have been kept and is not known.
    """
    wanted_T = np.array(sample["loss_mask"][:length], dtype=bool)
    if kept:
        wanted_T[wanted_T] = teacher.known(sample["teacher"][: wanted_T.sum()])
    return wanted_T[1:]


def _records_of(sample: Sample, length: int) -> np.ndarray:
    """What was kept of the distributions at these positions."""
    mask = sample["loss_mask"]
    records_M = sample["teacher"][mask[0] : sum(mask[:length])]
    return records_M[teacher.known(records_M)]


def collate(
    samples: Sequence[Sample],
    max_length: int,
    device: torch.device,
    packing: bool = False,
    kept: bool = False,
) -> Tokens:
    """Cut samples at `max_length` tokens, place them in rows, and pad those on the right.

    Args:
        kept: the distributions to learn are those that were kept.
    """
    lengths = [min(len(sample["input_ids"]), max_length) for sample in samples]
    rows = rows_of(lengths) if packing else [[index] for index in range(len(samples))]
    shape = len(rows), max(sum(lengths[index] for index in row) for row in rows)
    input_BT = torch.zeros(shape, dtype=torch.long)
    wanted_BT = torch.zeros(shape, dtype=torch.bool)
    sample_BT = torch.full(shape, -1)
    position_BT = torch.zeros(shape, dtype=torch.long)
    records = []
    for row, indices in enumerate(rows):
        start = 0
        for index in indices:
            stop = start + lengths[index]
            sample, length = samples[index], lengths[index]
            input_BT[row, start:stop] = torch.tensor(sample["input_ids"][:length])
            # the last token of a sample has no next one to learn
            wanted_BT[row, start : stop - 1] = torch.from_numpy(wanted_of(sample, length, kept))
            if kept:
                records.append(_records_of(sample, length))
            sample_BT[row, start:stop] = index
            position_BT[row, start:stop] = torch.arange(length)
            start = stop
    tokens = Tokens(input_BT.to(device), wanted_BT.to(device))
    if packing:
        tokens.sample_BT, tokens.position_BT = sample_BT.to(device), position_BT.to(device)
    if kept:
        told, chances = teacher.tensors(np.concatenate(records))
        tokens.kept = told.to(device), chances.to(device)
    return tokens


def frequent_tokens(samples: Sequence[Sample]) -> Tensor:
    """Every token that the assistant wrote, the most frequent first; ties by id."""
    counts = Counter(
        token
        for sample in samples
        for token, wanted in zip(sample["input_ids"], sample["loss_mask"], strict=True)
        if wanted
    )
    return torch.tensor(sorted(counts, key=lambda token: (-counts[token], token)))


def check_trainable(samples: Sequence[Sample], max_length: int) -> None:
    """Raise `DataError` where a sample has no token to learn from: it would pass in silence."""
    for index, sample in enumerate(samples):
        if any(sample["loss_mask"][1:max_length]):
            continue
        spans = ", ".join(f"{start} to {stop - 1}" for start, stop in answers(sample["loss_mask"]))
        text = "; ".join(f"{m['role']}: {m['content'][:200]!r}" for m in sample["messages"])
        raise DataError(
            f"sample {index} has no trainable token among its first {max_length}: of its "
            f"{len(sample['input_ids'])} tokens the loss mask has {spans or 'none'} as the "
            "assistant's, and the first of all has nothing to be predicted from. Raise "
            f"trainer.max_length or drop the sample. It reads: {text}"
        )
