"""What serving a target over several GPUs takes, alone and with something that drafts, on paper.

A pass of decoding reads its weights and the keys and values of all texts, or does the arithmetic of
its tokens, whichever takes longer; then the GPUs add up what they have computed. Sizes are bytes of
one GPU, times are seconds. As under vLLM's tensor parallelism, every GPU holds an equal part of
each matrix and a copy of each norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kangaroo.estimate.devices import PEAK, Device
from kangaroo.heads import for_vllm
from kangaroo.heads.base import Trainable
from kangaroo.models.loading import ModelConfig
from kangaroo.models.target import LM
from kangaroo.training.recipe import AdapterRecipe
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import (
    Count,
    DraftSize,
    Filled,
    NotNegative,
    Positive,
    Ranged,
    Share,
    Threshold,
)


@dataclass
class ServingConfig(Ranged):
    """A target on several GPUs of one machine, what may draft for it, and what a GPU does.

    Args:
        draft: a smaller model with the target's tokens.
        gpus: numbers of GPUs to plan for.
        texts: numbers of texts that are written at the same time.
        context: tokens of a text, prompt and answer.
        draft_acceptance, adapter_acceptance: the chance that a draft token is right if those before
            it are, of the draft model and of the adapter: assumptions.
        most_steps: draft tokens of a round, at most.
        gpu: what the GPU is called.
        memory: bytes of one GPU.
        bandwidth: bytes/s of its memory, by its data sheet.
        flops: dense FLOP/s in bfloat16, by its data sheet.
        memory_share: of the memory that vLLM takes (`--gpu-memory-utilization`, its default).
        reserved: bytes of it that are neither weights nor keys and values: an assumption.
        bandwidth_share, flops_share: that decoding reaches: assumptions.
        sum_seconds: of adding up one result over all GPUs, twice a layer: an assumption.
        page: a Markdown file, in whose place for it the plan is written.
    """

    draft: ModelConfig
    gpus: Filled[Count] = field(default_factory=lambda: [4, 8])
    texts: Filled[Count] = field(default_factory=lambda: [1, 8, 32])
    context: Count = 4096
    draft_acceptance: Threshold = 0.75
    adapter_acceptance: Threshold = 0.57
    most_steps: DraftSize = 10
    gpu: str = "H100 SXM"
    memory: Positive = 80e9
    bandwidth: Positive = 3.35e12
    flops: Positive = PEAK[Device.h100]
    memory_share: Share = 0.92
    reserved: NotNegative = 5e9
    bandwidth_share: Share = 0.8
    flops_share: Share = 0.6
    sum_seconds: NotNegative = 10e-6
    page: str | None = None


@dataclass(frozen=True)
class Pass:
    """What one pass of some layers reads and does on one GPU.

    Args:
        weights: that it reads, heads included; embeddings are looked up.
        multiplied: numbers among them that every token is multiplied with.
        token: of keys and values, for each token of a text.
        layers: after each half of which the GPUs add up.
    """

    weights: float
    multiplied: float
    token: float
    layers: int

    def seconds(self, tokens: int, texts: int, plan: ServingConfig) -> float:
        """Of so many tokens of each text."""
        read = self.weights + self.token * plan.context * texts
        reading = read / (plan.bandwidth * plan.bandwidth_share)
        work = 2 * self.multiplied * tokens * texts / (plan.flops * plan.flops_share)
        return max(reading, work) + 2 * self.layers * plan.sum_seconds


@dataclass(frozen=True)
class Drafting:
    """Something that drafts for a target, on one GPU of several.

    Args:
        weights: that it holds beside the target's.
        token: of keys and values that it holds beside the target's, for each token of a text.
        step: the pass of one draft token.
        acceptance: the chance that a draft token is right if those before it are.
    """

    weights: float
    token: float
    step: Pass
    acceptance: float


@dataclass(frozen=True)
class Round:
    """Draft and verification.

    Args:
        steps: draft tokens.
        tokens: that it writes, on average, the bonus token included.
        seconds: that it takes.
    """

    steps: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens/s of each text."""
        return self.tokens / self.seconds


def held(lm: LM, gpus: int) -> float:
    """Bytes of a model's weights on one of so many GPUs."""
    return _split(lm.parameters(), gpus) * lm.dtype.itemsize


def whole_pass(lm: LM, gpus: int) -> Pass:
    """All layers and the head."""
    return _pass(lm, range(lm.n_layers), [], lm.config.vocab_size, gpus)


def model_drafting(draft: LM, gpus: int, acceptance: float) -> Drafting:
    """By a model of its own, spread as the target is, as vLLM asks."""
    step = whole_pass(draft, gpus)
    return Drafting(held(draft, gpus), step.token, step, acceptance)


def adapter_drafting(
    lm: LM, recipe: AdapterRecipe, vocabulary: int | None, gpus: int, acceptance: float
) -> Drafting:
    """By the target's layers below the first exit of a recipe, and the adapter there.

    Args:
        vocabulary: how many tokens it drafts from; None is all.

    Errors: `ConfigError` for a kind that the plugin of vLLM cannot run.
    """
    if not for_vllm.runs(recipe.architecture):
        raise ConfigError(
            f"adapter={recipe.name} does not run in vLLM; pass adapter=attention, layer or "
            "own_head."
        )
    exit_layer = min(recipe.places(lm).values())
    tokens_K = None if vocabulary is None else torch.empty(vocabulary, device="meta")
    with torch.device("meta"):
        adapter = recipe.architecture.build(lm, exit_layer, tokens_K)
    rows = 0 if adapter.own_heads() else vocabulary or lm.config.vocab_size
    step = _pass(lm, range(exit_layer), [adapter], rows, gpus)
    own = _split(adapter.parameters(), gpus)
    if vocabulary is not None and not adapter.own_heads():  # rows of the head, gathered
        own += vocabulary * lm.config.hidden_size / gpus
    return Drafting(own * lm.dtype.itemsize, _token(lm, 1, gpus), step, acceptance)


def best_round(
    target: Pass, drafting: Drafting, texts: int, plan: ServingConfig
) -> tuple[Round, Round]:
    """Without a draft, and with as many draft tokens as write most tokens/s: where even one costs
    more than it brings, none.

    The target is counted as computing all of its layers for every token of the draft. With an
    adapter the plugin of vLLM runs only the last one through the layers below the exit, which reads
    the same weights.
    """
    one, chance = drafting.step.seconds(1, texts, plan), drafting.acceptance
    rounds = [
        Round(
            steps,
            sum(chance**step for step in range(steps + 1)),
            target.seconds(steps + 1, texts, plan) + steps * one,
        )
        for steps in range(plan.most_steps + 1)
    ]
    return rounds[0], max(rounds, key=lambda found: found.speed)


def room(target: float, drafting: Drafting | None, plan: ServingConfig) -> float:
    """Bytes of one GPU that are left for keys and values.

    Args:
        target: bytes of its weights.
    """
    weights = target + (drafting.weights if drafting else 0)
    return plan.memory * plan.memory_share - plan.reserved - weights


def _pass(lm: LM, layers: range, adapters: list[Trainable], rows: int, gpus: int) -> Pass:
    """
    Args:
        adapters: none or one, with a layer of its own.
        rows: of the target's head that it reads.
    """
    parameters = [p for index in layers for p in lm.layers[index].parameters()]
    parameters += [p for adapter in adapters for p in adapter.parameters()]
    numbers = _split(parameters, gpus) + rows * lm.config.hidden_size / gpus
    count = len(layers) + len(adapters)
    return Pass(numbers * lm.dtype.itemsize, numbers, _token(lm, count, gpus), count)


def _split(parameters: Iterable[Tensor], gpus: int) -> float:
    """How many of these numbers one GPU holds."""
    return sum(p.numel() / (gpus if p.ndim > 1 else 1) for p in parameters)


def _token(lm: LM, layers: int, gpus: int) -> int:
    """Bytes of keys and values a token, on one GPU: it has at least one head of each."""
    sizes = lm.sizes()
    heads = -(-sizes.kv_heads // gpus)
    return 2 * layers * heads * sizes.head_size * lm.dtype.itemsize
