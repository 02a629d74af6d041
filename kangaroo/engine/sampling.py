"""Choose tokens: filters, and noise that is a pure function of (seed, position, token).

The noise does not depend on how a token came to be considered. So a target and a drafter that see
the same distribution choose the same token, and a text depends on its seed, not on the drafter, the
batch or the step (drafter-invariant speculative decoding, arXiv 2408.07978).

Shapes: B rows, N nodes, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.utils.ranges import CountOrZero, NoiseSeed, NotNegative, Ranged, Share

_MASK = 0xFFFFFFFF
# Temperatures: logits divided by far less are infinite in float32, and by far more all alike.
GREEDY_BELOW, HOTTEST = 1e-6, 1e30


class Rule(Enum):
    """How sampled drafts are accepted."""

    match = "match"  # the target's own choice under shared noise
    rejection = "rejection"  # Leviathan et al. 2023, algorithm 1


class Stream(Enum):
    """Independent noises for one (seed, position)."""

    choice = 0
    accept = 1
    residual = 2


@dataclass
class Sampling(Ranged):
    """How tokens are chosen from the target's distribution.

    Args:
        temperature: 0 is greedy, and so is any below 1e-6, which becomes 0: logits divided by so
            little are mostly rounding in float32, and infinite at last. 1e30 is the highest.
        top_p: keep the smallest set of tokens whose probability reaches this, of one token at
            least; 1 keeps all.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        seed: the rows get `seed`, `seed + 1`, ... unless each has its own seed.
        rule: how a sampled draft is accepted; greedy decoding is the same under both.
    """

    temperature: NotNegative = 0.0
    top_p: Share = 1.0
    top_k: CountOrZero = 0
    seed: NoiseSeed = 0
    rule: Rule = Rule.match

    def __post_init__(self) -> None:
        super().__post_init__()
        self.temperature = min(self.temperature, HOTTEST)
        if self.temperature < GREEDY_BELOW:
            self.temperature = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0


@dataclass(frozen=True)
class Mixed:
    """Texts that are decoded together, each by settings of its own.

    Args:
        rows: of each text.
    """

    rows: tuple[Sampling, ...]

    @property
    def greedy(self) -> bool:
        """Whether all are."""
        return all(one.greedy for one in self.rows)

    def apart(self, choose: Callable[..., Tensor], seeds_B: Tensor, *tensors: Tensor) -> Tensor:
        """What `choose(*tensors, sampling, seeds)` makes of each row alone, together again.

        Args:
            tensors: `[B, ...]`, or one row for all.
        """
        parts = []
        for row, own in enumerate(self.rows):
            mine = (x[row if len(x) > 1 else 0][None] for x in tensors)
            parts.append(choose(*mine, own, seeds_B[row : row + 1]))
        return torch.cat(parts)


AnySampling = Sampling | Mixed


def together(rows: Sequence[Sampling]) -> AnySampling:
    """Settings of several texts as one, whose seeds do not count; there must be a text."""
    known = [replace(one, seed=0) for one in rows]
    return known[0] if all(one == known[0] for one in known) else Mixed(tuple(known))


def warp(logits_BNV: Tensor, sampling: Sampling) -> Tensor:
    """Tempered and filtered logits in float32, -inf where a filter removed the token.

    Temperature, then top-k, then top-p: the order of transformers' `generate`. Tokens tied with the
    k-th stay. Needs `temperature > 0`.
    """
    logits_BNV = logits_BNV.float() / sampling.temperature
    if 0 < sampling.top_k < logits_BNV.shape[-1]:
        kth = logits_BNV.topk(sampling.top_k).values[..., -1:]
        logits_BNV = logits_BNV.masked_fill(logits_BNV < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = logits_BNV.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        removed = (probs.cumsum(-1) - probs) >= sampling.top_p
        removed = F.pad(removed[..., 1:], (1, 0))  # the likeliest stays, even where top_p is 0
        removed = torch.zeros_like(removed).scatter(-1, index, removed)
        logits_BNV = logits_BNV.masked_fill(removed, -torch.inf)
    return logits_BNV


def _signed(constant: int) -> int:
    """The 32-bit integer with the same bits."""
    return constant - (1 << 32) if constant >= 1 << 31 else constant


def _mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3; int32, whose products wrap around as they should."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _signed(0x85EBCA6B)
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _signed(0xC2B2AE35)
    return x ^ ((x >> 16) & 0xFFFF)


def _low(x: Tensor) -> Tensor:
    """The low 32 bits of int64 numbers, as int32."""
    return (((x & _MASK) ^ 0x80000000) - 0x80000000).int()


def uniform(seeds_B: Tensor, positions_BN: Tensor, stream: Stream, size: int) -> Tensor:
    """`[B, N, size]` numbers in (0, 1), fixed by (seed, position, index, stream)."""
    key_B = _mix(_low(seeds_B) ^ _mix(_low((seeds_B >> 32) + 0x9E3779B9 * stream.value)))
    key_BN = _mix(_low(positions_BN * 0x9E3779B1) + key_B[:, None])
    index_V = torch.arange(size, device=positions_BN.device, dtype=torch.int32)
    hashed_V = _mix(index_V * _signed(0x85EBCA77) + 0x27D4EB2F)
    bits_BNV = _mix(hashed_V ^ key_BN[..., None]).view(torch.uint32)
    # float32 keeps small values exact, and the smallest decide an exponential race
    return ((bits_BNV.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def perturb(
    log_weights_BNV: Tensor, seeds_B: Tensor, positions_BN: Tensor, stream: Stream = Stream.choice
) -> Tensor:
    """Add Gumbel noise: the argmax is then a sample of each unnormalised log-distribution."""
    race = -torch.log1p(-uniform(seeds_B, positions_BN, stream, log_weights_BNV.shape[-1]))
    return log_weights_BNV - race.log_()


def pick(
    logits_BNV: Tensor, positions_BN: Tensor, sampling: AnySampling, seeds_B: Tensor
) -> Tensor:
    """The token that follows each node, `[B, N]`.

    Args:
        positions_BN: absolute position of the token to be chosen, one after its node's.
    """
    if sampling.greedy:
        return logits_BNV.argmax(-1)
    if isinstance(sampling, Mixed):
        return sampling.apart(pick, seeds_B, logits_BNV, positions_BN)
    return perturb(warp(logits_BNV, sampling), seeds_B, positions_BN).argmax(-1)


def candidates(
    logits_BNV: Tensor, positions_BN: Tensor, sampling: AnySampling, seeds_B: Tensor, count: int
) -> Tensor:
    """The `count` tokens `[B, N, count]` that a target with these logits is likeliest to pick.

    The first is the token of `pick`. Under noise the others are those with the next best scores.
    """
    if isinstance(sampling, Mixed):
        several = functools.partial(candidates, count=count)
        return sampling.apart(several, seeds_B, logits_BNV, positions_BN)
    if not sampling.greedy:
        logits_BNV = perturb(warp(logits_BNV, sampling), seeds_B, positions_BN)
    return logits_BNV.topk(count).indices
