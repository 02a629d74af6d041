"""Which samples make up each micro-batch: a pure function of the data, the seed and the epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kangaroo.data.chat import Sample
from kangaroo.errors import DataError


@dataclass
class Tokens:
    """A padded micro-batch.

    Args:
        input_BT: token ids, padded on the right, which a causal mask hides from real tokens.
        wanted_BT: true where the *next* token was written by the assistant: there, and only there,
            the adapter would have drafted.
    """

    input_BT: Tensor
    wanted_BT: Tensor


def plan(lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Micro-batches of at most `batch_tokens` padded tokens (or one sample), in shuffled order.

    Samples of similar length go together, so that little is padding.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    # the order within one length is random, else the same samples would meet every epoch
    shuffled = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = [[]]
    for index in sorted(shuffled, key=lambda i: lengths[i]):
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    order = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in order]


def collate(samples: Sequence[Sample], max_length: int, device: torch.device) -> Tokens:
    """Pad samples, cut at `max_length` tokens."""
    width = min(max_length, max(len(sample["input_ids"]) for sample in samples))
    input_BT = torch.zeros(len(samples), width, dtype=torch.long)
    wanted_BT = torch.zeros(len(samples), width, dtype=torch.bool)
    for row, sample in enumerate(samples):
        ids, mask = sample["input_ids"][:width], sample["loss_mask"][:width]
        input_BT[row, : len(ids)] = torch.tensor(ids)
        wanted_BT[row, : len(ids) - 1] = torch.tensor(mask[1:], dtype=torch.bool)
    return Tokens(input_BT.to(device), wanted_BT.to(device))


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
        if not any(sample["loss_mask"][1:max_length]):
            start = " ".join(str(m["content"]) for m in sample["messages"])[:200]
            raise DataError(
                f"sample {index} has no trainable token among its first {max_length}: no "
                "assistant turn lies there. Raise trainer.max_length or drop the sample. It "
                f"begins: {start!r}"
            )
