"""What the engine's tests decode."""

import torch
from cases import Case
from helpers import random_prompts
from scipy.stats import chisquare
from torch import Tensor

from kangaroo.engine.sampling import Sampling

NEW_TOKENS = 16
PROMPTS = random_prompts(6, 1, 21)
HOT = Sampling(temperature=2.0, seed=11)
SMALL = 1e-4  # p-values: the draws are fixed by their seeds, so a test passes or fails always


def continuations(case: Case) -> list[list[int]]:
    return [text[len(prompt) :] for prompt, text in zip(PROMPTS, case.texts, strict=True)]


def fresh_place(tokens: list[int]) -> int:
    """A place from 2 on whose token did not occur before."""
    return next(i for i in range(2, len(tokens)) if tokens[i] not in tokens[:i])


class Letters:
    """Writes each token as `<number>`, and the tokens in `raw` as bytes of their own."""

    def __init__(self, raw: dict[int, bytes] | None = None):
        self.raw = raw or {}

    def decode(self, tokens: list[int], **options: bool) -> str:
        parts = [self.raw.get(token, f"<{token}>".encode()) for token in tokens]
        return b"".join(parts).decode(errors="replace")


def assert_distributed(tokens: Tensor, probs: Tensor) -> None:
    """A p-value below `SMALL` would come up once in ten thousand draws of a right sampler."""
    counts = torch.bincount(tokens, minlength=probs.numel()).double()
    probs = probs.flatten().double()
    kept = probs > 0
    assert counts[~kept].sum() == 0
    expected = probs[kept] / probs[kept].sum() * counts.sum()
    assert chisquare(counts[kept].numpy(), expected.numpy()).pvalue > SMALL
