"""The parts of training whose cost is measured, and the micro-batches that they work on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from kangaroo.data import store
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.models.target import LM
from kangaroo.training import backend as backends
from kangaroo.training.batches import Tokens, collate, frequent_tokens, plan
from kangaroo.training.config import TrainerConfig
from kangaroo.training.micro_batch import forward_target, train_step
from kangaroo.training.recipe import AdapterRecipe, trainees
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, Filled, Ranged, TextLength

FROZEN, HEAD = "frozen forward", "frozen forward, teacher's head"

Work = Callable[[int], None]


@dataclass
class CostConfig(Ranged):
    """What is measured.

    Args:
        data: folder of a dataset, whose micro-batches are read; None takes random tokens.
        micro_batches: that every part reads in each round, of `trainer.batch_tokens`.
        rounds: of all parts; the results are medians over them.
        exit_layers: the first is that of all parts with one exit; two and all of them show what
            further exits cost.
        vocabulary: size of the draft vocabulary of the parts that have one.
        length: of a row of random tokens.
        memory: also measure peak memory; on a CPU in a process for each part.
    """

    data: str | None = None
    micro_batches: Count = 4
    rounds: Count = 5
    exit_layers: Filled[Count] = field(default_factory=lambda: [3, 2, 4, 6])
    vocabulary: Count = 8192
    length: TextLength = 256
    memory: bool = True


@dataclass(frozen=True)
class Part:
    """Something that training does with a micro-batch.

    Args:
        recipes: the adapters; none is the target alone.
        vocabulary: size of the draft vocabulary; None is all.
        remembered: the target's states are there from an earlier epoch.
        head: the target alone also computes its logits.
        summed: its gradient is added up exactly, as where a step has several micro-batches.
    """

    name: str
    recipes: tuple[AdapterRecipe, ...] = ()
    vocabulary: int | None = None
    remembered: bool = False
    head: bool = True
    summed: bool = False


def parts(config: CostConfig) -> list[Part]:
    """From the frozen forward alone upwards."""
    first, few = config.exit_layers[:1], config.vocabulary

    def attention(exits: Sequence[int]) -> tuple[AdapterRecipe, ...]:
        return (AdapterRecipe("attention", AdapterHeadConfig(), list(exits)),)

    counts = sorted({2, len(config.exit_layers)} - {0, 1})
    layer = AdapterRecipe("layer", AdapterHeadConfig(feed_forward=True), first)
    fused = AdapterRecipe("fused", AdapterHeadConfig(feed_forward=True, fused=True), first)
    return [
        Part(FROZEN, head=False),
        Part(HEAD),
        Part("attention, whole vocabulary", attention(first)),
        Part("attention, whole vocabulary, exact sum", attention(first), summed=True),
        Part("attention", attention(first), few),
        *(Part(f"attention, {n} exits", attention(config.exit_layers[:n]), few) for n in counts),
        Part("layer", (layer,), few),
        *(
            Part(f"fused, draft steps {n}", (replace(fused, draft_steps=n),), few)
            for n in (1, 2, 3)
        ),
        Part("attention, remembered", attention(first), few, remembered=True),
    ]


def micro_batches(
    lm: LM, config: CostConfig, trainer: TrainerConfig
) -> tuple[list[Tokens], Tensor]:
    """The micro-batches on the target's device, and the tokens of the draft vocabulary, ascending.

    Those of a dataset are spread over its lengths. Of random tokens the last three quarters of a
    row count as the assistant's.

    Errors: `ConfigError` where there are too few.
    """
    size = min(config.vocabulary, lm.config.vocab_size)
    if config.data is None:
        shape = max(1, trainer.batch_tokens // config.length), config.length
        generator = torch.Generator().manual_seed(trainer.seed)
        made = []
        for _ in range(config.micro_batches):
            input_BT = torch.randint(lm.config.vocab_size, shape, generator=generator)
            wanted_BT = torch.arange(config.length).expand(shape) >= config.length // 4
            made.append(Tokens(input_BT.to(lm.device), wanted_BT.to(lm.device)))
        return made, torch.arange(size)
    samples, _ = store.load(Path(config.data))
    lengths = [min(len(sample["input_ids"]), trainer.max_length) for sample in samples]
    batches = plan(lengths, trainer.batch_tokens, trainer.seed, 0, trainer.packing)
    if len(batches) < config.micro_batches:
        raise ConfigError(
            f"'{config.data}' has {len(batches)} micro-batches of {trainer.batch_tokens} tokens; "
            f"cost.micro_batches={config.micro_batches} is too many."
        )
    chosen = batches[: config.micro_batches]
    collated = [
        collate([samples[i] for i in batch], trainer.max_length, lm.device, trainer.packing)
        for batch in chosen
    ]
    return collated, frequent_tokens(samples)[:size].sort()[0]


def worker(
    lm: LM, part: Part, batches: Sequence[Tokens], few_K: Tensor, trainer: TrainerConfig
) -> Work:
    """What does the part's work on the micro-batch of an index, one optimizer step included."""
    if not part.recipes:

        def alone(index: int) -> None:
            tokens = batches[index]
            if part.head:
                forward_target(lm, tokens, (), trainer.chunk)
            else:
                with torch.no_grad():
                    x_BTD = lm.embed(tokens.input_BT)
                    block = replace(tokens.block(lm), rows=slice(0, len(x_BTD)))
                    lm.norm(lm.run(x_BTD, None, block, range(lm.n_layers))[0])

        return alone
    vocabulary_K = None if part.vocabulary is None else few_K
    trained = trainees(lm, part.recipes, vocabulary_K)
    adapters = [t.adapter.to(lm.layer_devices[t.adapter.exit_layer - 1]) for t in trained]
    backend = backends.begin(adapters, replace(trainer, accumulate=1 + part.summed, zero_stage=0))
    seen = (
        [forward_target(lm, tokens, trained, trainer.chunk) for tokens in batches]
        if part.remembered
        else None
    )

    def learn(index: int) -> None:
        tokens = batches[index]
        known = seen[index] if seen else forward_target(lm, tokens, trained, trainer.chunk)
        train_step(lm, known, trained, trainer.chunk, weight=1 / int(tokens.wanted_BT.sum()))
        backend.collect()
        backend.step([1e-4] * len(adapters))

    return learn
