"""Train adapters on a frozen target: one forward of the target gives inputs and teacher for all.

Read it top to bottom: the loop, held-out figures, saving. What a micro-batch teaches is in
`micro_batch.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kangaroo import memory
from kangaroo.errors import ConfigError
from kangaroo.model import LM
from kangaroo.prompts import Sample
from kangaroo.provenance import provenance
from kangaroo.ranks import Ranks
from kangaroo.tracking import Tracker
from kangaroo.trained import adapter_files
from kangaroo.training import backend as backends
from kangaroo.training import curves, results
from kangaroo.training.batches import collate, frequent_tokens, plan
from kangaroo.training.checkpoint import Checkpoint, Progress, begun_with
from kangaroo.training.config import TrainerConfig, schedule
from kangaroo.training.decode import decode, prompts_of
from kangaroo.training.micro_batch import Seen, grade, guesses, look, teach
from kangaroo.training.recipe import AdapterRecipe, Trainee, trainees
from kangaroo.training.results import STEPS
from kangaroo.training.work import Work

log = logging.getLogger(__name__)


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
    if config.remember and any(recipe.on_policy for recipe in recipes):
        raise ConfigError(
            "adapter.on_policy=true goes on from the target's keys and values, which are too many "
            "to keep of all texts; pass trainer.remember=false."
        )
    work = Work.of(samples, config)
    config, accumulate = settled(config, output, ranks)
    if ranks.is_first and accumulate < ranks.world:
        log.warning(
            "trainer.accumulate=%d keeps %d of the %d processes busy, and the others wait. Start "
            "fewer, or begin a new run (output=) without trainer.accumulate.",
            accumulate, accumulate, ranks.world,
        )  # fmt: skip
    total = math.ceil(len(work.batches) / accumulate)
    # a sharded target is run by all processes at once, and its layers are gathered for every token
    decoded = 0 if config.shard_target else config.decode_prompts
    longest = min(config.max_length, lm.context - config.decode_tokens)
    prompts = prompts_of(work.held_out, decoded, longest, config.decode_tokens)
    frequent_K = frequent_tokens(work.kept)
    if config.vocabulary is not None and config.vocabulary < 1:
        raise ConfigError(
            f"trainer.vocabulary={config.vocabulary} must be 1 or more; unset it for all tokens."
        )
    vocabulary_K = None if config.vocabulary is None else frequent_K[: config.vocabulary].sort()[0]

    shard_on = ranks.device if config.shard_target else None
    trained = trainees(lm, recipes, vocabulary_K, shard_on, config.seed)
    rates = [trainee.recipe.learning_rate or config.learning_rate for trainee in trained]
    backend = backends.begin([trainee.adapter for trainee in trained], config, ranks)
    settings = config.identity() | {"adapters": [trainee.settings() for trainee in trained]}
    checkpoint = Checkpoint(output, settings, data=about["fingerprint"])
    progress, state = ranks.share(checkpoint.resume() if ranks.is_first else (Progress(), None))
    if state is not None:
        backend.load_state(state)

    names = results.step_names(trained)
    remembered: dict[tuple[int, ...], Seen] = {}
    bar = tqdm(
        total=total, initial=progress.step, unit="step", desc="training",
        disable=not ranks.is_first,
    )  # fmt: skip
    while progress.step < total:
        started = time.perf_counter()
        first = progress.step * accumulate
        group = work.batches[first : first + accumulate]
        # weighted by all positions of the step, so that the mean does not depend on the split
        wanted = sum(work.positions[i] for batch in group for i in batch)
        sums = []
        for batch, counts in ranks.deal(group):
            seen = remembered.get(tuple(batch)) or _look(lm, work.kept, batch, config, trained)
            if config.remember:
                remembered[tuple(batch)] = seen
            grades = teach(lm, seen, trained, config.loss_chunk, weight=counts / wanted)
            sums.append(results.sums(grades))
            backend.collect()
        sums_SF = torch.stack(ranks.merge(sums, len(group))).sum(0)
        share = schedule(config, progress.step, total)
        backend.step([share * rate for rate in rates])

        tokens = sum(work.tokens[i] for batch in group for i in batch)
        seconds = time.perf_counter() - started
        progress.seconds += seconds
        progress.step += 1
        progress.tokens += tokens
        progress.assistant_tokens += wanted
        metrics = results.named("train", names, sums_SF) | {
            "tokens": progress.tokens,
            "tokens_per_second": tokens / seconds,
            "peak_memory_gib": memory.peak(lm.device) / 2**30,
        }
        for trainee, rate in zip(trained, rates, strict=True):
            metrics[f"train/{trainee.name}/learning_rate"] = share * rate
        last = progress.step == total
        if last or progress.step % config.evaluate_every == 0:
            progress.held_out = evaluate(lm, trained, work.held_out, config, ranks)
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
    for trainee in trained:
        right = _guesses(lm, trainee, work.held_out, config, ranks)
        if ranks.is_first:
            _save(lm, trainee, config, progress, about, frequent_K, right, output, ranks)
    if ranks.is_first:
        curves.write(output)
    return [output / trainee.name for trainee in trained]


def settled(config: TrainerConfig, output: Path, ranks: Ranks) -> tuple[TrainerConfig, int]:
    """The options with `accumulate` as a number, and that number: the given one, else that of the
    run in `output`, else one micro-batch for each process.
    """
    accumulate = config.accumulate
    if accumulate is None:
        begun = begun_with(output) if ranks.is_first else {}
        accumulate = ranks.share(begun.get("accumulate", ranks.world))
    return replace(config, accumulate=accumulate), accumulate


def evaluate(
    lm: LM, trained: Sequence[Trainee], samples: Sequence[Sample], config: TrainerConfig,
    ranks: Ranks,
) -> dict[str, float]:  # fmt: skip
    """Held-out figures of every adapter: `held_out/<name>/<figure>`."""
    found = []
    lengths = [min(len(sample["input_ids"]), config.max_length) for sample in samples]
    batches = plan(lengths, config.batch_tokens, seed=0, epoch=0, packing=config.packing)
    for batch, _ in ranks.deal(batches):
        seen = _look(lm, samples, batch, config, trained)
        grades = grade(lm, seen, trained, config.loss_chunk, STEPS)
        accepted = [
            results.accepted(own, seen.tokens.wanted_BT, trainee.recipe.medusa_heads or STEPS)
            for trainee, own in zip(trained, grades, strict=True)
        ]
        found.append((results.sums(grades), torch.stack(accepted).cpu()))
    all_sums, all_accepted = zip(*ranks.merge(found, len(batches)), strict=True)
    sums_SF, accepted_AW = torch.stack(all_sums).sum(0), torch.stack(all_accepted).sum(0)
    return results.held_out(trained, sums_SF, accepted_AW)


def _guesses(
    lm: LM, trainee: Trainee, samples: Sequence[Sample], config: TrainerConfig, ranks: Ranks
) -> list[list[float]]:
    """How often each guess of each of Medusa's heads is right, from which its tree is made."""
    if not trainee.recipe.medusa_heads:
        return []
    lengths = [min(len(sample["input_ids"]), config.max_length) for sample in samples]
    batches = plan(lengths, config.batch_tokens, seed=0, epoch=0, packing=config.packing)
    found = [
        guesses(lm, _look(lm, samples, batch, config, [trainee]), trainee, config.loss_chunk)
        for batch, _ in ranks.deal(batches)
    ]
    all_right, all_counts = zip(*ranks.merge(found, len(batches)), strict=True)
    return (torch.stack(all_right).sum(0) / torch.stack(all_counts).sum(0)[:, None]).tolist()


def _look(
    lm: LM, samples: Sequence[Sample], batch: list[int], config: TrainerConfig,
    trained: Sequence[Trainee],
) -> Seen:  # fmt: skip
    chosen = [samples[i] for i in batch]
    tokens = collate(chosen, config.max_length, lm.device, config.packing)
    return look(lm, tokens, trained, config.loss_chunk)


def _save(
    lm: LM, trainee: Trainee, config: TrainerConfig, progress: Progress, about: dict[str, Any],
    frequent_K: Tensor, guesses: list[list[float]], output: Path, ranks: Ranks,
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
    vocabulary_K = trainee.vocabulary_K  # smaller than asked for if the data has fewer tokens
    size = None if vocabulary_K is None else len(vocabulary_K)
    described = adapter_files.describe(lm, trainee.adapter, training, size, guesses)
    kept = adapter_files.kept_dtype(trainee.adapter, lm)
    adapter_files.save(trainee.adapter, described, frequent_K, output / trainee.name, kept)
