"""Chooses tokens by filters and by noise that is a pure function of (seed, position, token).

A target and a drafter that see the same distribution choose the same token. A text depends on its
seed, and not on drafter, batch or step (drafter-invariant decoding, arXiv 2408.07978).

Shapes: B rows, N nodes, V vocabulary, K likeliest tokens.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from kangaroo.engine.cache import power_of_two
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import CountOrZero, NoiseSeed, NotNegative, Ranged, Share

# Logits divided by a far lower temperature are infinite in float32, by a far higher one all equal.
GREEDY_BELOW = 1e-6
HOTTEST = 1e30
# Coefficients of a polynomial for 2^30 * 2^g, 0 <= g < 1, the highest power first; 1e-7 accurate.
POWERS_OF_TWO = 2004817, 9681959, 59914703, 257874614, 744265554, 1 << 30


class Rule(Enum):
    """How sampled drafts are accepted."""

    match = "match"  # where they are the target's own choice under shared noise
    rejection = "rejection"  # Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1
    block = "block"  # block verification, arXiv 2403.10444, algorithm 2


class NoiseStream(Enum):
    """Independent streams of noise for one (seed, position)."""

    choice = 0
    accept = 1
    residual = 2


@dataclass
class Sampling(Ranged):
    """How tokens are chosen from the target's distribution.

    Args:
        temperature: divides the logits; below 1e-6 it becomes 0, which is greedy; at most 1e30.
        top_p: keep the smallest set of tokens, of at least one, whose probability reaches this.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        seed: rows get `seed`, `seed + 1`, ... unless each has its own seed.
        rule: how a sampled draft is accepted; greedy decoding is the same under all rules.
    """

    temperature: NotNegative = 0.0
    top_p: Share = 1.0
    top_k: CountOrZero = 0
    seed: NoiseSeed = 0
    rule: Rule = Rule.match

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self.rule = Rule(self.rule)  # it may be a rule's name
        except ValueError as error:
            rules = ", ".join(rule.value for rule in Rule)
            raise ConfigError(f"sampling.rule={self.rule} must be one of {rules}.") from error
        self.temperature = min(self.temperature, HOTTEST)
        if self.temperature < GREEDY_BELOW:
            self.temperature = 0.0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0


@dataclass(frozen=True, eq=False)
class BatchSampling:
    """How the texts of a batch are drawn. The settings of each row are its temperature, top_p
    (infinite if it keeps all tokens) and top_k. `greedy` is true if all texts are, and `filters_p`
    if a top_p removes tokens; `most_k` is a power of two that no top_k exceeds, 0 without any."""

    settings_B3: Tensor
    greedy: bool
    most_k: int
    filters_p: bool
    rule: Rule

    @property
    def kind(self) -> Hashable:
        """All that is not in a tensor, as part of a recording's key."""
        return self.greedy, self.most_k, self.filters_p, self.rule

    def reading(self, settings_B3: Tensor) -> "BatchSampling":
        """The same with these settings: a copy of its own in other memory, or some of its rows."""
        return replace(self, settings_B3=settings_B3)

    @property
    def columns(self) -> list[Tensor]:
        """Temperature, top_p and top_k, each `[B, 1, 1]`."""
        return list(self.settings_B3[:, :, None, None].unbind(1))


def settings(sampling: Sampling) -> list[float]:
    """The row of `BatchSampling.settings_B3` for a text."""
    top_p = sampling.top_p if sampling.top_p < 1 else math.inf
    return [sampling.temperature, top_p, min(sampling.top_k, 1 << 24)]  # exact in float32


def combine(rows: Sequence[Sampling], settings_B3: Tensor | None = None) -> BatchSampling:
    """The sampling of a batch of texts that share a rule, by default with settings on the CPU."""
    if settings_B3 is None:
        settings_B3 = torch.tensor([settings(row) for row in rows])
    sampled = [row for row in rows if not row.greedy]
    most_k = max((power_of_two(row.top_k) for row in sampled if row.top_k), default=0)
    filters_p = any(row.top_p < 1 for row in sampled)
    return BatchSampling(
        settings_B3, greedy=not sampled, most_k=most_k, filters_p=filters_p, rule=rows[0].rule
    )


def pick(logits_BNV: Tensor, at_BN: Tensor, sampling: BatchSampling, seeds_B: Tensor) -> Tensor:
    """The first of the `candidates` after each node, `[B, N]`."""
    return candidates(logits_BNV, at_BN, sampling, seeds_B, count=1)[..., 0]


def candidates(
    logits_BNV: Tensor, at_BN: Tensor, sampling: BatchSampling, seeds_B: Tensor, count: int
) -> Tensor:
    """The `count` tokens of the highest `scores` after each node, in order, `[B, N, count]`. If
    the filters leave fewer, the likeliest of the other tokens follow."""
    scores_BNV = scores(logits_BNV, at_BN, sampling, seeds_B)
    if count == 1:
        return scores_BNV.argmax(-1, True)
    best = scores_BNV.topk(count)
    if not sampling.most_k and not sampling.filters_p:
        return best.indices
    left_BN1 = best.values.isfinite().sum(-1, True)
    removed_BNV = logits_BNV.masked_fill(scores_BNV.isfinite(), -torch.inf)
    rank_C = torch.arange(count, device=logits_BNV.device)
    others = removed_BNV.topk(count).indices.gather(-1, (rank_C - left_BN1).clamp(min=0))
    return torch.where(rank_C < left_BN1, best.indices, others)


def scores(logits_BNV: Tensor, at_BN: Tensor, sampling: BatchSampling, seeds_B: Tensor) -> Tensor:
    """Scores of the tokens after each node, `[B, N, V]`, of which a target with these logits
    chooses the highest; `at` are the tokens' positions."""
    if sampling.greedy:
        return logits_BNV
    drawn_BNV = perturb(warp(logits_BNV, sampling), seeds_B, at_BN)
    return torch.where(sampling.columns[0] == 0, logits_BNV.float(), drawn_BNV)


def warp(logits_BNV: Tensor, sampling: BatchSampling) -> Tensor:
    """Logits in float32 after temperature, top-k and top-p, in transformers' order; -inf where a
    filter removed the token. Tokens tied with the k-th stay. Rows of temperature 0 have no use."""
    temperature_B11, top_p_B11, top_k_B11 = sampling.columns
    logits_BNV = logits_BNV.float() / temperature_B11
    if sampling.most_k:
        likeliest = logits_BNV.topk(min(sampling.most_k, logits_BNV.shape[-1])).values
        last_B11 = (top_k_B11.long() - 1).clamp(0, likeliest.shape[-1] - 1)
        kth = likeliest.gather(-1, last_B11.expand_as(likeliest[..., :1]))
        kth = kth.masked_fill(top_k_B11 == 0, -torch.inf)
        logits_BNV = logits_BNV.masked_fill(logits_BNV < kth, -torch.inf)
    if sampling.filters_p:
        ordered, index = logits_BNV.sort(dim=-1, descending=True, stable=True)
        chances = whole_exp(ordered - ordered[..., :1])
        sums = chances.cumsum(-1)
        removed = (sums - chances).double() >= top_p_B11.double() * sums[..., -1:].double()
        removed[..., 0].zero_()  # the likeliest stays, even where top_p is 0
        removed = torch.zeros_like(removed).scatter(-1, index, removed)
        logits_BNV = logits_BNV.masked_fill(removed, -torch.inf)
    return logits_BNV


def whole_exp(x: Tensor) -> Tensor:
    """Whole numbers near 2^44 e^x for x <= 0, whose sums are the same in any order and batch. They
    are computed in whole numbers too, since each library has its own exp (`cpp/sampling.h`)."""
    power = (x.clamp(min=-32) * 24204406.0).long()  # e^x is 2^(power / 2^24)
    part = power & 0xFFFFFF
    scaled = torch.zeros_like(power)
    for coefficient in POWERS_OF_TWO:
        scaled = (scaled * part >> 24) + coefficient
    return (scaled << 14) >> -(power >> 24)


def perturb(
    log_p_BNV: Tensor, seeds_B: Tensor, at_BN: Tensor, stream: NoiseStream = NoiseStream.choice
) -> Tensor:
    """Add Gumbel noise: then the argmax is a sample of each (unnormalised) distribution."""
    race = -torch.log1p(-uniform(seeds_B, at_BN, stream, log_p_BNV.shape[-1]))
    return log_p_BNV - race.log_()


def uniform(seeds_B: Tensor, positions_BN: Tensor, stream: NoiseStream, size: int) -> Tensor:
    """`[B, N, size]` numbers in (0, 1), fixed by (seed, position, index, stream)."""
    # `int` keeps the lower 32 bits of an int64 number
    key_B = _mix(seeds_B.int() ^ _mix(((seeds_B >> 32) + 0x9E3779B9 * stream.value).int()))
    key_BN = _mix((positions_BN * 0x9E3779B1).int() + key_B[:, None])
    index_V = torch.arange(size, device=positions_BN.device, dtype=torch.int32)
    hashed_V = _mix(index_V * (0x85EBCA77 - (1 << 32)) + 0x27D4EB2F)
    bits_BNV = _mix(hashed_V ^ key_BN[..., None]).view(torch.uint32)
    # float32 keeps small values exact, and the smallest decide an exponential race
    return ((bits_BNV.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def _mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3, in int32, whose products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * (0x85EBCA6B - (1 << 32))
    x = (x ^ ((x >> 13) & 0x7FFFF)) * (0xC2B2AE35 - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)
