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
from torch import Tensor, nn
from tqdm import tqdm

from kangaroo import adapter_files
from kangaroo.data.chat import Sample
from kangaroo.errors import ConfigError
from kangaroo.model import LM
from kangaroo.provenance import provenance
from kangaroo.tracking import Tracker
from kangaroo.training import figures
from kangaroo.training.batches import check_trainable, collate, frequent_tokens, plan
from kangaroo.training.checkpoint import Checkpoint, Progress
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
        accumulate: micro-batches an optimizer step.
        clip: largest gradient norm of each adapter.
        max_length: samples are cut here.
        holdout: this many samples at the end are never trained on.
        loss_chunk: assistant positions whose logits exist at a time.
        evaluate_every, save_every: optimizer steps.
        seed: order of the samples.
        vocabulary: draft from this many of the training data's most frequent tokens; None is all.
    """

    epochs: int = 3
    learning_rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 30
    batch_tokens: int = 1024
    packing: bool = False
    remember: bool = False
    accumulate: int = 1
    clip: float = 1.0
    max_length: int = 2048
    holdout: int = 128
    loss_chunk: int = 256
    evaluate_every: int = 200
    save_every: int = 50
    seed: int = 0
    vocabulary: int | None = None


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
    output: Path, tracker: Tracker, about: dict[str, Any],
) -> list[Path]:  # fmt: skip
    """Train all adapters, each saved in its own folder under `output`.

    A run that was stopped at any moment goes on from its last checkpoint, and ends with the same
    weights as one that was not.

    Args:
        about: provenance of the data, saved with the adapters.

    Errors: `DataError` for a sample without trainable tokens, `ConfigError` where nothing is left
    to train on or `output` holds the checkpoint of other settings.
    """
    check_trainable(samples, config.max_length)
    if not 0 < config.holdout < len(samples):
        raise ConfigError(
            f"trainer.holdout={config.holdout} must leave some of the {len(samples)} samples to "
            "train on, and hold at least one out."
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
    positions = [sum(sample["loss_mask"][1 : config.max_length]) for sample in kept]
    total = math.ceil(len(batches) / config.accumulate)
    frequent_K = frequent_tokens(kept)
    vocabulary_K = None if config.vocabulary is None else frequent_K[: config.vocabulary].sort()[0]

    trained = trainees(lm, recipes, vocabulary_K)
    adapters = [trainee.adapter for trainee in trained]
    optimizer = torch.optim.AdamW(
        [{"params": adapter.parameters()} for adapter in adapters],
        lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay,
    )  # fmt: skip
    settings = asdict(config) | {"adapters": [trainee.settings() for trainee in trained]}
    del settings["evaluate_every"], settings["save_every"]  # neither moves a weight
    checkpoint = Checkpoint(output, settings, data=about["fingerprint"])
    progress = checkpoint.resume(adapters, optimizer)

    names = figures.step_names(trained)
    remembered: dict[tuple[int, ...], Seen] = {}
    bar = tqdm(total=total, initial=progress.step, unit="step", desc="training")
    while progress.step < total:
        started = time.perf_counter()
        first = progress.step * config.accumulate
        group = batches[first : first + config.accumulate]
        # weighted by all positions of the step, so that the mean does not depend on the split
        wanted = sum(positions[i] for batch in group for i in batch)
        sums_SF = torch.zeros(())
        for batch in group:
            seen = remembered.get(tuple(batch)) or _look(lm, kept, batch, config, trained)
            if config.remember:
                remembered[tuple(batch)] = seen
            grades = teach(lm, seen, trained, config.loss_chunk, weight=1 / wanted)
            sums_SF = sums_SF + figures.sums(grades)
        share = schedule(config, progress.step, total)
        for trainee, parameters in zip(trained, optimizer.param_groups, strict=True):
            nn.utils.clip_grad_norm_(parameters["params"], config.clip)
            parameters["lr"] = share * (trainee.recipe.learning_rate or config.learning_rate)
        optimizer.step()
        optimizer.zero_grad()

        tokens = sum(lengths[i] for batch in group for i in batch)
        progress.step += 1
        progress.tokens += tokens
        progress.assistant_tokens += wanted
        metrics = figures.named("train", names, sums_SF) | {
            "learning_rate": share * config.learning_rate,
            "tokens_per_second": tokens / (time.perf_counter() - started),
        }
        last = progress.step == total
        if last or progress.step % config.evaluate_every == 0:
            progress.held_out = evaluate(lm, trained, held_out, config)
            metrics |= progress.held_out
        checkpoint.log(progress.step, metrics)
        tracker.log(metrics, progress.step)
        if last or progress.step % config.save_every == 0:
            checkpoint.save(adapters, optimizer, progress)
        bar.update()
        bar.set_postfix(
            loss=f"{metrics[f'train/{names[0]}/loss']:.3f}",
            agree=f"{metrics[f'train/{names[0]}/agreement']:.3f}",
        )
    bar.close()
    return [_save(lm, t, config, progress, about, frequent_K, output) for t in trained]


def evaluate(
    lm: LM, trained: Sequence[Trainee], samples: Sequence[Sample], config: TrainerConfig
) -> dict[str, float]:
    """Held-out figures of every adapter: `held_out/<name>/<figure>`."""
    sums_AF: Tensor = torch.zeros(())
    accepted_AW: Tensor = torch.zeros(())
    lengths = [min(len(sample["input_ids"]), config.max_length) for sample in samples]
    for batch in plan(lengths, config.batch_tokens, seed=0, epoch=0, packing=config.packing):
        seen = _look(lm, samples, batch, config, trained)
        grades = grade(lm, seen, trained, config.loss_chunk, figures.STEPS)
        sums_AF = sums_AF + figures.sums([own[:1] for own in grades])
        accepted_AW = accepted_AW + torch.stack(
            [figures.accepted(own, seen.tokens.wanted_BT) for own in grades]
        )
    names = [trainee.name for trainee in trained]
    metrics = figures.named("held_out", names, sums_AF)
    for name, sums_F, accepted_W in zip(names, sums_AF, accepted_AW, strict=True):
        metrics |= figures.compression(name, accepted_W, positions=float(sums_F[-1]))
    return metrics


def _look(
    lm: LM, samples: Sequence[Sample], batch: list[int], config: TrainerConfig,
    trained: Sequence[Trainee],
) -> Seen:  # fmt: skip
    chosen = [samples[i] for i in batch]
    tokens = collate(chosen, config.max_length, lm.device, config.packing)
    return look(lm, tokens, trained, config.loss_chunk)


def _save(
    lm: LM, trainee: Trainee, config: TrainerConfig, progress: Progress, about: dict[str, Any],
    frequent_K: Tensor, output: Path,
) -> Path:  # fmt: skip
    mine = f"held_out/{trainee.name}/"
    held_out = {k.removeprefix(mine): v for k, v in progress.held_out.items() if k.startswith(mine)}
    training = {
        "adapter": trainee.settings(),
        "trainer": asdict(config),
        "progress": asdict(progress) | {"held_out": held_out},
        "data": about,
    } | provenance()
    described = adapter_files.describe(lm, trainee.adapter, training, config.vocabulary)
    return adapter_files.save(trainee.adapter, described, frequent_K, output / trainee.name)
