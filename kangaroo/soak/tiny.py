"""Tiny random targets of every family, with prompts, limits and an EOS drawn from a seed."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import torch

from kangaroo.engine.requests import Request
from kangaroo.models.loading import random_model
from kangaroo.models.target import LM
from kangaroo.soak.drafters import DRAFTERS
from kangaroo.soak.settings import SAMPLINGS, Setting, alone, sampling_of

VOCABULARY = 64
REQUESTS = 40
PROMPT, LIMIT = (1, 100), (1, 160)  # tokens of a prompt, and the most of its text
CHUNKS = (16, 1024)  # they give the same text in float32 alone
EOS_SHARE = 0.75  # of the settings; in the others every text ends at its limit

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# transformers' model type and what differs from `target`'s fields; each by tensors and natively.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied head": ("llama", {"tie_word_embeddings": True}),
    "llama, scaled RoPE": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, ungrouped heads": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
}
COMPILED = ", compiled"
FAMILIES = [f"{name}{how}" for name in ARCHITECTURES for how in (COMPILED, "")]


@cache
def target(family: str, device: str, dtype: torch.dtype = torch.float32) -> LM:
    """A random target without EOS, whose last layers change little: so shallow drafts
    are often right.
    """
    name, compiled = family.removesuffix(COMPILED), family.endswith(COMPILED)
    architecture, others = ARCHITECTURES[name]
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    hf: Any = random_model(architecture, deep_scale=0.15, **(fields | others))
    generator = torch.Generator().manual_seed(1)
    for parameter in hf.parameters():
        if parameter.ndim == 1:  # norms begin at one and biases at zero, which would hide mistakes
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    hf.model.norm.weight.data *= 2  # as sure of its tokens, here and there, as a trained model
    for parameter in hf.parameters():  # RoPE's frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    lm = LM(hf.requires_grad_(False).to(device))
    return lm.compile_for_decoding() if compiled else lm


class Tiny:
    """Every family with every sampling, in turn."""

    name = "tiny"
    drafters = DRAFTERS

    def __init__(self, seed: int, device: str, dtype: torch.dtype = torch.float32):
        self.seed, self.device, self.dtype = seed, device, dtype
        exact = dtype == torch.float32
        self.families = [name for name in FAMILIES if exact or name.endswith(COMPILED)]
        self.chunks = CHUNKS if exact else CHUNKS[1:]

    def setting(self, number: int) -> Setting:
        """Prompts of random tokens. Usually one token of vanilla's texts is made the EOS, so that
        it ends these texts in the middle, and drafts as well.
        """
        rng = Random(f"{self.seed}/{self.name}/{number}")
        family, sampling = self.families[number % len(self.families)], sampling_of(number)
        lm, how = target(family, self.device, self.dtype), SAMPLINGS[sampling]
        requests = [
            Request(
                [rng.randrange(VOCABULARY) for _ in range(rng.randint(*PROMPT))],
                rng.randint(*LIMIT),
                rng.randrange(1 << 31),
            )
            for _ in range(REQUESTS)
        ]
        texts = alone(lm, requests, how, frozenset())
        eos_ids = frozenset[int]()
        if rng.random() < EOS_SHARE:
            longest = max(texts, key=len)
            eos_ids = frozenset({max(longest, key=longest.index)})  # the last one to occur
        texts = [cut(text, eos_ids) for text in texts]
        return Setting(family, sampling, lm, requests, texts, eos_ids, self.chunks)


def cut(text: list[int], eos_ids: frozenset[int]) -> list[int]:
    """The text up to its first EOS, which is kept."""
    end = next((i for i, token in enumerate(text) if token in eos_ids), len(text))
    return text[: end + 1]
