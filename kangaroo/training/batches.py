"""What a run trains on, and in which micro-batches: a pure function of samples and options.

Shapes: B rows, T tokens of a row, M wanted positions, J stored tokens.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kangaroo.data.filters import answers
from kangaroo.engine import topk_logits
from kangaroo.engine.cache import ForwardMeta
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.training.config import TrainerConfig
from kangaroo.utils.errors import ConfigError, DataError


@dataclass
class Work:
    """What a run trains on, and what it holds out.

    Args:
        training, held_out: samples to train on, and those that are never trained on.
        tokens: how many of each training sample are read.
        positions: how many of those are learnt.
        batches: the micro-batches of all epochs, as indices into `training`.
    """

    training: Sequence[Sample]
    held_out: Sequence[Sample]
    tokens: list[int]
    positions: list[int]
    batches: list[list[int]]

    @staticmethod
    def of(samples: Sequence[Sample], config: TrainerConfig) -> Work:
        """Errors: `DataError` for a sample without trainable tokens, `ConfigError` where nothing is
        left to train on."""
        check_trainable(samples, config.max_length)
        check_holdout(config.holdout, len(samples))
        training = first(samples[: -config.holdout], config.tokens, config.max_length)
        tokens = lengths_of(training, config.max_length)
        stored = bool(config.use_stored_logits)
        wanted = (wanted_of(sample, config.max_length, stored) for sample in training)
        positions = [int(wanted_T.sum()) for wanted_T in wanted]
        same = (config.accumulate or 1) if config.cache_target_states else 0
        batches = [
            batch
            for epoch in range(config.epochs)
            for batch in plan(tokens, config.batch_tokens, config.seed, epoch, config.packing, same)
        ]
        return Work(training, samples[-config.holdout :], tokens, positions, batches)


def check_holdout(holdout: int, count: int) -> None:
    """Errors: `ConfigError` where nothing of so many samples is left to train on."""
    if holdout >= count:
        fix = f"Pass trainer.holdout={max(1, count // 10)}" if count > 1 else "Give it more data"
        raise ConfigError(
            f"trainer.holdout={holdout} leaves nothing to train on of {count} conversations. {fix}."
        )


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


def first(samples: Sequence[Sample], tokens: int | None, max_length: int) -> Sequence[Sample]:
    """The first samples that together hold so many of the assistant's tokens; None is all.

    Errors: `ConfigError` where all of them hold fewer.
    """
    if tokens is None:
        return samples
    sums = list(itertools.accumulate(sum(s["loss_mask"][1:max_length]) for s in samples))
    if tokens > sums[-1]:
        raise ConfigError(
            f"trainer.tokens={tokens} is more than the {sums[-1]} tokens of the assistant that "
            "the data has beside what is held out. Lower it, or make more data."
        )
    return samples[: bisect.bisect_left(sums, tokens) + 1]


def lengths_of(samples: Sequence[Sample], max_length: int) -> list[int]:
    """How many tokens of each are read."""
    return [min(len(sample["input_ids"]), max_length) for sample in samples]


def frequent_tokens(samples: Sequence[Sample]) -> Tensor:
    """Every token that the assistant wrote, the most frequent first; ties by id."""
    counts = Counter(
        token
        for sample in samples
        for token, wanted in zip(sample["input_ids"], sample["loss_mask"], strict=True)
        if wanted
    )
    return torch.tensor(sorted(counts, key=lambda token: (-counts[token], token)))


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
            is the n-th of another, but for a few, and so stays with the process that has its
            target states.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    if same and epoch:
        batches = plan(lengths, batch_tokens, seed, 0, packing)
        count = len(batches)  # epochs follow each other without a gap, wherever steps begin
        order = torch.randperm(count, generator=generator).tolist()
        before = sorted(order, key=lambda i: i % same)
        places = sorted(range(count), key=lambda i: (epoch * count + i) % same)
        return [batches[i] for _, i in sorted(zip(places, before, strict=True))]
    # the order within one length is random, else the same samples would meet every epoch
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    batches = [[]]
    for index in shuffled if packing else sorted(shuffled, key=lambda i: lengths[i]):
        together = [lengths[i] for i in (*batches[-1], index)]
        rows = len(rows_of(together)) if packing else len(together)
        if batches[-1] and rows * max(together) > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    if packing:
        return batches
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


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
        stored: where the target's distributions were stored, those of the wanted positions, row
            after row: likeliest tokens and their chances, each `[M, J]`.
    """

    input_BT: Tensor
    wanted_BT: Tensor
    sample_BT: Tensor | None = None
    position_BT: Tensor | None = None
    stored: tuple[Tensor, Tensor] | None = None

    def forward_meta(self, lm: TargetModel) -> ForwardMeta:
        """Where the tokens sit: no token sees another sample, and positions restart with each."""
        width = self.input_BT.shape[1]
        if self.sample_BT is None or self.position_BT is None:
            return lm.chunk(0, width, row=0, n_slots=width)
        slots_BT = torch.arange(width, device=self.input_BT.device).expand_as(self.input_BT)
        same_BTT = self.sample_BT[:, :, None] == self.sample_BT[:, None, :]
        seen_BTT = same_BTT & (slots_BT[:, :, None] >= slots_BT[:, None, :])
        rows, rope = slice(0, len(slots_BT)), lm.rope(self.position_BT)
        # boolean: the target and the adapter, which trains in float32, share it
        return ForwardMeta(slots_BT, self.position_BT, seen_BTT[:, None], width, rows, rope)


def wanted_of(sample: Sample, length: int, stored: bool = False) -> np.ndarray:
    """`[length - 1]`: which of a sample's tokens, from the second on, are learnt: the assistant's,
    but for those whose distribution should have been stored and is not known.
    """
    wanted_T = np.array(sample["loss_mask"][:length], dtype=bool)
    if stored:
        wanted_T[wanted_T] = topk_logits.known(sample["teacher"][: wanted_T.sum()])
    return wanted_T[1:]


def collate(
    samples: Sequence[Sample],
    max_length: int,
    device: torch.device,
    packing: bool = False,
    stored: bool = False,
) -> Tokens:
    """Cut samples at `max_length` tokens, place them in rows, and pad those on the right.

    Args:
        stored: the distributions to learn are those that were stored.
    """
    lengths = lengths_of(samples, max_length)
    rows = rows_of(lengths) if packing else [[index] for index in range(len(samples))]
    shape = len(rows), max(sum(lengths[index] for index in row) for row in rows)
    input_BT, position_BT = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    wanted_BT, sample_BT = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1)
    records = []
    for row, indices in enumerate(rows):
        start = 0
        for index in indices:
            sample, length, stop = samples[index], lengths[index], start + lengths[index]
            input_BT[row, start:stop] = torch.tensor(sample["input_ids"][:length])
            # the last token of a sample has no next one to learn
            wanted_BT[row, start : stop - 1] = torch.from_numpy(wanted_of(sample, length, stored))
            sample_BT[row, start:stop] = index
            position_BT[row, start:stop] = torch.arange(length)
            start = stop
            if stored:
                mask = sample["loss_mask"][:length]
                records_M = sample["teacher"][mask[0] : sum(mask)]
                records.append(records_M[topk_logits.known(records_M)])
    tokens = Tokens(input_BT.to(device), wanted_BT.to(device))
    if packing:
        tokens.sample_BT, tokens.position_BT = sample_BT.to(device), position_BT.to(device)
    if stored:
        likeliest, chances = topk_logits.tensors(np.concatenate(records))
        tokens.stored = likeliest.to(device), chances.to(device)
    return tokens
