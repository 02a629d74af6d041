"""Train adapters on a frozen target: one forward of the target gives inputs and teacher for all.

Read it top to bottom: configuration, one micro-batch, held-out evaluation, the loop, checkpoints.

Shapes: B rows, T tokens, M assistant positions, D hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kangaroo import adapter as adapters
from kangaroo.adapter import Adapter
from kangaroo.data.chat import Sample
from kangaroo.errors import ConfigError
from kangaroo.model import LM
from kangaroo.provenance import provenance
from kangaroo.ranks import Ranks
from kangaroo.tracking import Tracker
from kangaroo.training import backend as backends
from kangaroo.training.batches import check_trainable, collate, frequent_tokens, plan
from kangaroo.training.checkpoint import Checkpoint, Progress
from kangaroo.training.distill import Scores, distill


@dataclass
class TrainerConfig:
    """How adapters are trained.

    Args:
        exit_layers: one adapter each, all from the same frozen forward.
        epochs: passes over the training samples.
        learning_rate: the peak, reached after `warmup_steps` optimizer steps; then a cosine to 0.
        batch_tokens: padded tokens of a micro-batch (or one sample).
        accumulate: micro-batches an optimizer step, in all processes together.
        clip: largest gradient norm of each adapter.
        max_length: samples are cut here.
        holdout: this many samples at the end are never trained on.
        loss_chunk: assistant positions whose logits exist at a time.
        evaluate_every, save_every: optimizer steps.
        seed: order of the samples.
        vocabulary: saved with the adapters: how many of the most frequent tokens to draft from.
        bf16: compute adapters in bfloat16; weights, gradients and moments stay float32.
        zero_stage: 0 is plain torch in one process; 1 and 2 are DeepSpeed ZeRO.
        shard_target: each process holds a part of the target's layers and gathers one at a time.
    """

    exit_layers: list[int] = field(default_factory=lambda: [3])
    epochs: int = 3
    learning_rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 30
    batch_tokens: int = 1024
    accumulate: int = 1
    clip: float = 1.0
    max_length: int = 2048
    holdout: int = 128
    loss_chunk: int = 256
    evaluate_every: int = 200
    save_every: int = 50
    seed: int = 0
    vocabulary: int | None = None
    bf16: bool = False
    zero_stage: int = 0
    shard_target: bool = False


def learning_rate(config: TrainerConfig, step: int, total: int) -> float:
    """Of optimizer step `step` of `total`: linear warm-up, then a cosine that ends at 0."""
    warmup = min(config.warmup_steps, total - 1)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def micro_batch(
    lm: LM, trained: Sequence[Adapter], samples: Sequence[Sample], config: TrainerConfig,
    weight: float | None,
) -> list[Scores]:  # fmt: skip
    """Score one micro-batch for every adapter.

    Args:
        weight: gradients of `weight` x the summed loss are added up; None only scores.
    """
    tokens = collate(samples, config.max_length, lm.device)
    block = lm.chunk(0, tokens.input_BT.shape[1], row=0, n_slots=tokens.input_BT.shape[1])
    with torch.no_grad():
        x_BTD, taps = lm.run(
            lm.embed(tokens.input_BT), None, block, range(lm.n_layers), config.exit_layers
        )
        teacher_MD = lm.hf.model.norm(x_BTD[tokens.wanted_BT.to(x_BTD.device)])
    results = []
    for adapter in trained:
        f_BTD = taps[adapter.exit_layer].to(adapter.norm.weight)
        computing = torch.autocast(f_BTD.device.type, torch.bfloat16, enabled=config.bf16)
        with torch.set_grad_enabled(weight is not None), computing:
            student_MD = adapter(f_BTD, None, block.to(f_BTD.device))[
                tokens.wanted_BT.to(f_BTD.device)
            ]
        scores, gradient_MD = distill(
            lm, teacher_MD, student_MD, config.loss_chunk, backward=weight is not None
        )
        if weight is not None:
            student_MD.backward(gradient_MD * weight)
        results.append(scores)
    return results


def evaluate(
    lm: LM, trained: Sequence[Adapter], samples: Sequence[Sample], config: TrainerConfig,
    ranks: Ranks,
) -> dict[str, float]:  # fmt: skip
    """Held-out figures of every adapter: `held_out/exit<layer>/<figure>`."""
    lengths = [len(sample["input_ids"]) for sample in samples]
    batches = plan(lengths, config.batch_tokens, seed=0, epoch=0)
    scores = [
        micro_batch(lm, trained, [samples[i] for i in batch], config, weight=None)
        for batch, _ in ranks.deal(batches)
    ]
    return named("held_out", trained, add_up(ranks.merge(scores, len(batches))))


def train(
    lm: LM, samples: Sequence[Sample], config: TrainerConfig, output: Path, tracker: Tracker,
    about: dict[str, Any], ranks: Ranks | None = None,
) -> list[Path]:  # fmt: skip
    """Train an adapter for every exit layer, each saved in its own folder under `output`.

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
    kept, held_out = samples[: -config.holdout], samples[-config.holdout :]
    lengths = [min(len(sample["input_ids"]), config.max_length) for sample in kept]
    batches = [
        batch
        for epoch in range(config.epochs)
        for batch in plan(lengths, config.batch_tokens, config.seed, epoch)
    ]
    total = math.ceil(len(batches) / config.accumulate)

    trained = [Adapter(lm, layer).start_from(lm).float().train() for layer in config.exit_layers]
    if config.shard_target:
        lm.shard(ranks.device)
    trained = [a.to(lm.layer_devices[a.exit_layer - 1]).requires_grad_() for a in trained]
    backend = backends.begin(
        trained, config.betas, config.weight_decay, config.clip, config.zero_stage
    )
    settings = asdict(config)
    for name in ("evaluate_every", "save_every", "zero_stage", "shard_target"):
        del settings[name]  # none of them moves a weight
    checkpoint = Checkpoint(output, settings, data=about["fingerprint"])
    progress, state = ranks.share(checkpoint.resume() if ranks.is_first else (Progress(), None))
    if state is not None:
        backend.load_state(state)

    bar = tqdm(
        total=total, initial=progress.step, unit="step", desc="training",
        disable=not ranks.is_first,
    )  # fmt: skip
    while progress.step < total:
        started = time.perf_counter()
        first = progress.step * config.accumulate
        group = [[kept[i] for i in batch] for batch in batches[first : first + config.accumulate]]
        # weighted by all positions of the step, so that the mean does not depend on the split
        wanted = sum(sum(s["loss_mask"][1 : config.max_length]) for batch in group for s in batch)
        scores = []
        for batch, counts in ranks.deal(group):
            scores.append(micro_batch(lm, trained, batch, config, weight=counts / wanted))
            backend.collect()
        sums = add_up(ranks.merge(scores, len(group)))
        rate = learning_rate(config, progress.step, total)
        backend.step(rate)

        tokens = sum(len(s["input_ids"]) for batch in group for s in batch)
        progress.step += 1
        progress.tokens += tokens
        progress.assistant_tokens += wanted
        metrics = named("train", trained, sums) | {
            "learning_rate": rate,
            "tokens_per_second": tokens / (time.perf_counter() - started),
        }
        last = progress.step == total
        if last or progress.step % config.evaluate_every == 0:
            progress.held_out = evaluate(lm, trained, held_out, config, ranks)
            metrics |= progress.held_out
        if ranks.is_first:
            checkpoint.log(progress.step, metrics)
            tracker.log(metrics, progress.step)
        if last or progress.step % config.save_every == 0:
            state = backend.state()
            if ranks.is_first:
                checkpoint.save(state, progress)
        bar.update()
        bar.set_postfix(
            loss=f"{sums[0].means()['loss']:.3f}", agree=f"{sums[0].means()['agreement']:.3f}"
        )
    bar.close()
    folders = [output / f"exit{adapter.exit_layer}" for adapter in trained]
    if ranks.is_first:
        processes = {"processes": ranks.world}
        training = asdict(config) | asdict(progress) | {"data": about} | processes | provenance()
        frequent_K = frequent_tokens(kept)
        for adapter, folder in zip(trained, folders, strict=True):
            about_adapter = adapters.describe(lm, adapter, training, config.vocabulary)
            adapters.save(adapter, about_adapter, frequent_K, folder)
    return folders


def named(prefix: str, trained: Sequence[Adapter], sums: Sequence[Scores]) -> dict[str, float]:
    """Means under `<prefix>/exit<layer>/<figure>`."""
    return {
        f"{prefix}/exit{adapter.exit_layer}/{name}": value
        for adapter, scores in zip(trained, sums, strict=True)
        for name, value in scores.means().items()
    }


def add_up(batches: Sequence[Sequence[Scores]]) -> list[Scores]:
    """The scores of every adapter over some micro-batches."""
    return [sum(scores, Scores()) for scores in zip(*batches, strict=True)]
