"""What is kept of the target's distributions while it writes: its likeliest tokens.

A record belongs to a token that was written, and describes the distribution that this token was
chosen from: the one at the position before it, over the whole vocabulary, at temperature 1 and
without noise. What the chances of a record leave to 1 is the mass of all other tokens.

Shapes: B rows, N nodes, P nodes of a path, M tokens, K likeliest tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Range

MOST = 64  # of `choice.h`
Likeliest = Annotated[int, Range(0, MOST)]
Rows = Sequence[np.ndarray | None]  # None for each where nothing is kept


def check(count: int, name: str) -> None:
    """Errors: `ConfigError` for a number of likeliest tokens that cannot be kept."""
    if not 0 <= count <= MOST:
        raise ConfigError(
            f"{name}={count} must be 1 to {MOST} likeliest tokens, or 0 to keep nothing."
        )


def layout(vocab_size: int, count: int) -> np.dtype:
    """A record: `tokens`, the likeliest first, and their `chances`.

    Half precision is exact to 1/2048 of a chance, and 0 below 3e-8.
    """
    token = np.uint16 if vocab_size <= 1 << 16 else np.int32
    return np.dtype([("tokens", token, (count,)), ("chances", np.float16, (count,))])


def records(tokens: np.ndarray, chances: np.ndarray, vocab_size: int) -> np.ndarray:
    """Records `[...]` of numbers `[..., K]`."""
    kept = np.empty(tokens.shape[:-1], layout(vocab_size, tokens.shape[-1]))
    kept["tokens"], kept["chances"] = tokens, chances
    return kept


def likeliest(logits_BNV: Tensor, path_BP: Tensor, count: int) -> Rows:
    """Of each row records `[P]` of the `count` likeliest tokens, at the nodes of its path."""
    if not count:
        return [None] * len(logits_BNV)
    logits_BNV = logits_BNV.float()
    top = logits_BNV.topk(count)
    chances_BNK = (top.values - logits_BNV.logsumexp(-1, keepdim=True)).exp()
    path_BPK = path_BP[..., None].expand(-1, -1, count)
    tokens, chances = (x.gather(1, path_BPK).cpu().numpy() for x in (top.indices, chances_BNK))
    return list(records(tokens, chances, logits_BNV.shape[-1]))


def first(teacher_M: np.ndarray, count: int) -> np.ndarray:
    """The same records with so many of their likeliest tokens."""
    names = teacher_M.dtype.names or ()
    if teacher_M.dtype[names[0]].shape == (count,):
        return teacher_M
    parts = [(name, teacher_M.dtype[name].base, (count,)) for name in names]
    new_M = np.empty(len(teacher_M), parts)
    for name in names:
        new_M[name] = teacher_M[name][:, :count]
    return new_M


def likeliest_kept(teacher_M: np.ndarray) -> int:
    """How many likeliest tokens its records have."""
    (count,) = teacher_M.dtype["tokens"].shape
    return int(count)


def unknown(count: int, like: np.ndarray) -> np.ndarray:
    """Records of so many tokens whose distributions are not known."""
    return np.zeros(count, like.dtype)


def known(teacher_M: np.ndarray) -> np.ndarray:
    """`[M]`: which records are of distributions that are known: a likeliest token's chance cannot
    be 0."""
    return teacher_M["chances"][:, 0] > 0


def tensors(teacher_M: np.ndarray) -> tuple[Tensor, Tensor]:
    """Tokens (int64) and chances (float32), each `[M, K]`."""
    tokens_MK = torch.from_numpy(teacher_M["tokens"].astype(np.int64))
    return tokens_MK, torch.from_numpy(teacher_M["chances"].astype(np.float32))
