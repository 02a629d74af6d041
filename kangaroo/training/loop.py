"""Train adapters on a frozen target: one forward of the target gives inputs and teacher for all.

Read it top to bottom: configuration, the loop, held-out figures. What a micro-batch teaches is in
`micro_batch.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kangaroo import adapter_files
from kangaroo.data.chat import Sample
from kangaroo.errors import ConfigError
from kangaroo.model import LM
from kangaroo.provenance import provenance
from kangaroo.ranks import Ranks
from kangaroo.tracking import Tracker
from kangaroo.training import backend as backends
from kangaroo.training import curves, figures
from kangaroo.training.batches import check_trainable, collate, frequent_tokens, plan
from kangaroo.training.checkpoint import Checkpoint, Progress
from kangaroo.training.decode import decode, prompts_of
from kangaroo.training.micro_batch import Seen, grade, look, teach
from kangaroo.training.recipe import AdapterRecipe, Trainee, trainees


@dataclass
class TrainerConfig:
    """How adapters are trained.

    Args:
        epochs: passes over the training samples.
        learning_rate: the peak, reached after `warmup_steps` optimizer steps; then a cosine to 0.
        batch_tokens: padded tokens of a micro-batch (or one sample).
        packing: samples stand one after another in shared rows, without seeing each other.
        remember: keep what the target computes of each micro-batch, in memory: only the first epoch
            runs it. Micro-batches then stay the same, and come in another order every epoch.
        accumulate: micro-batches an optimizer step, in all processes together.
        clip: largest gradient norm of each adapter.
        max_length: samples are cut here.
        holdout: this many samples at the end are never trained on.
        loss_chunk: assistant positions whose logits exist at a time.
        evaluate_every, save_every, decode_every: optimizer steps, and once more after the last.
        decode_prompts: held-out prompts to decode for real; 0 is none. A sharded target decodes
            nothing.
        decode_tokens: new tokens of each.
        seed: order of the samples.
        vocabulary: draft from this many of the training data's most frequent tokens; None is all.
        zero_stage: 0 is plain torch in one process; 1 and 2 are DeepSpeed ZeRO.
        shard_target: each process holds a part of the target's layers and gathers one at a time.
    """

    epochs: int = 3
    learning_rate: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 30
    batch_tokens: int = 512
    packing: bool = False
    remember: bool = False
    accumulate: int = 1
    clip: float = 1.0
    max_length: int = 2048
    holdout: int = 128
    loss_chunk: int = 256
    evaluate_every: int = 200
    save_every: int = 50
    decode_every: int = 1000
    decode_prompts: int = 16
    decode_tokens: int = 128
    seed: int = 0
    vocabulary: int | None = None
    zero_stage: int = 0
    shard_target: bool = False


def schedule(config: TrainerConfig, step: int, total: int) -> float:
    """Share of the peak learning rate at optimizer step `step` of `total`.

    Linear warm-up, then a cosine that ends at 0.
    """
    warmup = min(config.warmup_steps, total - 1)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def train(
    lm: LM, samples: Sequence[Sample], recipes: Sequence[AdapterRecipe], config: TrainerConfig,
    output: Path, tracker: Tracker, about: dict[str, Any], ranks: Ranks | None = None,
) -> list[Path]:  # fmt: skip
    """Train all adapters, each saved in its own folder under `output`.

    A run that was stopped at any moment goes on from its last checkpoint, and ends with the same
    weights as one that was not, whatever the number of processes before and after.

    Args:
        about: provenance of the data, saved with the adapters.
        ranks: the processes that share the work, all with these arguments; the first one alone
            writes files. None: there is only this one.

    Errors: `DataError` for a sample without trainable tokens, `ConfigError` where nothing is left
    to train on or `output` holds the checkpoint of other settings.
    """
    ranks = ranks or Ranks()
    check_trainable(samples, config.max_length)
    if not 0 < config.holdout < len(samples):
        raise ConfigError(
            f"trainer.holdout={config.holdout} must leave some of the {len(samples)} samples to "
            "train on, and hold at least one out."
        )
    if config.remember and any(recipe.on_policy for recipe in recipes):
        raise ConfigError(
            "adapter.on_policy=true goes on from the target's keys and values, which are too many "
            "to keep of all texts; pass trainer.remember=false."
        )
    kept, held_out = samples[: -config.holdout], samples[-config.holdout :]
    lengths = [min(len(sample["input_ids"]), config.max_length) for sample in kept]
    batches = [
        batch
        for epoch in range(config.epochs)
        for batch in plan(
            lengths, config.batch_tokens, config.seed, epoch, config.packing, config.remember
        )
    ]
    # a sharded target is run by all processes at once, and its layers are gathered for every token
    decoded = 0 if config.shard_target else config.decode_prompts
    longest = min(config.max_length, lm.context - config.decode_tokens)
    prompts = prompts_of(held_out, decoded, longest, config.decode_tokens)
    positions = [sum(sample["loss_mask"][1 : config.max_length]) for sample in kept]
    total = math.ceil(len(batches) / config.accumulate)
    frequent_K = frequent_tokens(kept)
    vocabulary_K = None if config.vocabulary is None else frequent_K[: config.vocabulary].sort()[0]

    shard_on = ranks.device if config.shard_target else None
    trained = trainees(lm, recipes, vocabulary_K, shard_on)
    rates = [trainee.recipe.learning_rate or config.learning_rate for trainee in trained]
    backend = backends.begin([trainee.adapter for trainee in trained], config)
    settings = asdict(config) | {"adapters": [trainee.settings() for trainee in trained]}
    for name in (
        "evaluate_every", "save_every", "zero_stage", "shard_target",
        "decode_every", "decode_prompts", "decode_tokens",
    ):  # fmt: skip
        del settings[name]  # none of them moves a weight
    checkpoint = Checkpoint(output, settings, data=about["fingerprint"])
    progress, state = ranks.share(checkpoint.resume() if ranks.is_first else (Progress(), None))
    if state is not None:
        backend.load_state(state)

    names = figures.step_names(trained)
    remembered: dict[tuple[int, ...], Seen] = {}
    bar = tqdm(
        total=total, initial=progress.step, unit="step", desc="training",
        disable=not ranks.is_first,
    )  # fmt: skip
    while progress.step < total:
        started = time.perf_counter()
        first = progress.step * config.accumulate
        group = batches[first : first + config.accumulate]
        # weighted by all positions of the step, so that the mean does not depend on the split
        wanted = sum(positions[i] for batch in group for i in batch)
        sums = []
        for batch, counts in ranks.deal(group):
            seen = remembered.get(tuple(batch)) or _look(lm, kept, batch, config, trained)
            if config.remember:
                remembered[tuple(batch)] = seen
            grades = teach(lm, seen, trained, config.loss_chunk, weight=counts / wanted)
            sums.append(figures.sums(grades))
            backend.collect()
        sums_SF = torch.stack(ranks.merge(sums, len(group))).sum(0)
        share = schedule(config, progress.step, total)
        backend.step([share * rate for rate in rates])

        tokens = sum(lengths[i] for batch in group for i in batch)
        progress.step += 1
        progress.tokens += tokens
        progress.assistant_tokens += wanted
        metrics = figures.named("train", names, sums_SF) | {
            "tokens": progress.tokens,
            "tokens_per_second": tokens / (time.perf_counter() - started),
            "peak_memory_gib": figures.peak_memory(lm.device),
        }
        for trainee, rate in zip(trained, rates, strict=True):
            metrics[f"train/{trainee.name}/learning_rate"] = share * rate
        last = progress.step == total
        if last or progress.step % config.evaluate_every == 0:
            progress.held_out = evaluate(lm, trained, held_out, config, ranks)
            metrics |= progress.held_out
        # one process decodes: the others need nothing of it and wait where they next meet
        if prompts and ranks.is_first and (last or progress.step % config.decode_every == 0):
            progress.decoded = decode(lm, trained, prompts, config.decode_tokens)
            metrics |= progress.decoded
        if ranks.is_first:
            checkpoint.log(progress.step, metrics)
            tracker.log(metrics, progress.step)
        if last or progress.step % config.save_every == 0:
            state = backend.state()
            if ranks.is_first:
                checkpoint.save(state, progress)
        bar.update()
        bar.set_postfix(
            loss=f"{metrics[f'train/{names[0]}/loss']:.3f}",
            agree=f"{metrics[f'train/{names[0]}/agreement']:.3f}",
        )
    bar.close()
    if ranks.is_first:
        for trainee in trained:
            _save(lm, trainee, config, progress, about, frequent_K, output, ranks)
        curves.write(output)
    return [output / trainee.name for trainee in trained]


def evaluate(
    lm: LM, trained: Sequence[Trainee], samples: Sequence[Sample], config: TrainerConfig,
    ranks: Ranks,
) -> dict[str, float]:  # fmt: skip
    """Held-out figures of every adapter: `held_out/<name>/<figure>`."""
    results = []
    lengths = [min(len(sample["input_ids"]), config.max_length) for sample in samples]
    batches = plan(lengths, config.batch_tokens, seed=0, epoch=0, packing=config.packing)
    for batch, _ in ranks.deal(batches):
        seen = _look(lm, samples, batch, config, trained)
        grades = grade(lm, seen, trained, config.loss_chunk, figures.STEPS)
        accepted = [figures.accepted(own, seen.tokens.wanted_BT) for own in grades]
        results.append((figures.sums(grades), torch.stack(accepted).cpu()))
    all_sums, all_accepted = zip(*ranks.merge(results, len(batches)), strict=True)
    sums_SF, accepted_AW = torch.stack(all_sums).sum(0), torch.stack(all_accepted).sum(0)
    return figures.held_out(trained, sums_SF, accepted_AW)


def _look(
    lm: LM, samples: Sequence[Sample], batch: list[int], config: TrainerConfig,
    trained: Sequence[Trainee],
) -> Seen:  # fmt: skip
    chosen = [samples[i] for i in batch]
    tokens = collate(chosen, config.max_length, lm.device, config.packing)
    return look(lm, tokens, trained, config.loss_chunk)


def _save(
    lm: LM, trainee: Trainee, config: TrainerConfig, progress: Progress, about: dict[str, Any],
    frequent_K: Tensor, output: Path, ranks: Ranks,
) -> None:  # fmt: skip
    def mine(metrics: dict[str, float], prefix: str) -> dict[str, float]:
        own = f"{prefix}/{trainee.name}/"
        return {k.removeprefix(own): v for k, v in metrics.items() if k.startswith(own)}

    compared = {
        "held_out": mine(progress.held_out, "held_out"),
        "decoded": mine(progress.decoded, "decode"),
    }
    training = {
        "adapter": trainee.settings(),
        "trainer": asdict(config),
        "progress": asdict(progress) | compared,
        "data": about,
        "processes": ranks.world,
    } | provenance()
    described = adapter_files.describe(lm, trainee.adapter, training, config.vocabulary)
    adapter_files.save(trainee.adapter, described, frequent_K, output / trainee.name)
