"""Records of the distributions from which the target chose each token: the likeliest tokens and
their probabilities, at temperature 1 and without noise.

Shapes: B rows, N nodes, P nodes of a path, M tokens, K likeliest tokens of each, V vocabulary.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from kangaroo.utils.ranges import Range

MOST = 64  # tokens of a record, as in `sampling.h`
Likeliest = Annotated[int, Range(0, MOST)]
Rows = Sequence[np.ndarray | None]  # records of each row; None for a row that keeps nothing


def records(tokens: np.ndarray, chances: np.ndarray, vocab_size: int) -> np.ndarray:
    """Records `[...]` of `tokens` and their `chances`, `[..., K]`, the likeliest first."""
    token = np.uint16 if vocab_size <= 1 << 16 else np.int32
    shape = tokens.shape[-1:]
    topk = np.empty(tokens.shape[:-1], [("tokens", token, shape), ("chances", np.float32, shape)])
    topk["tokens"] = tokens
    topk["chances"] = chances
    return topk


def rounded(topk: np.ndarray) -> np.ndarray:
    """The records with chances in half precision: right to 1/2048 of the value, 0 below 3e-8."""
    tokens = topk.dtype["tokens"]
    return topk.astype([("tokens", tokens), ("chances", np.float16, tokens.shape)])


def likeliest(logits_BNV: Tensor, path_BP: Tensor, count: int) -> Rows:
    """Each row's records `[P]` of the `count` likeliest tokens after the nodes of its path."""
    if not count:
        return [None] * len(logits_BNV)
    logits_BNV = logits_BNV.float()
    top = logits_BNV.topk(count)
    chances_BNK = (top.values - logits_BNV.logsumexp(-1, keepdim=True)).exp()
    path_BPK = path_BP[..., None].expand(-1, -1, count)
    tokens, chances = (x.gather(1, path_BPK).cpu().numpy() for x in (top.indices, chances_BNK))
    return list(records(tokens, chances, logits_BNV.shape[-1]))


def nonempty(teacher_M: np.ndarray) -> np.ndarray:
    """Which records hold something, `[M]`: the likeliest token's chance cannot be 0."""
    return teacher_M["chances"][:, 0] > 0


def tensors(teacher_M: np.ndarray) -> tuple[Tensor, Tensor]:
    """The records' tokens (int64) and chances (float32), each `[M, K]`."""
    tokens_MK = torch.from_numpy(teacher_M["tokens"].astype(np.int64))
    return tokens_MK, torch.from_numpy(teacher_M["chances"].astype(np.float32))
