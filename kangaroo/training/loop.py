"""Train adapters on a frozen target: one forward of the target gives inputs and teacher for all.

Read it top to bottom: the run, one step, held-out results, saving. What a micro-batch teaches is in
`micro_batch.py`.

Shapes: S draft steps of all adapters, F results of each, A adapters, W draft tokens, K draft
vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kangaroo.engine.clock import running
from kangaroo.heads import adapter_files
from kangaroo.models.prompts import Sample
from kangaroo.models.target import LM
from kangaroo.training import backend as backends
from kangaroo.training import curves, kept, results
from kangaroo.training.batches import collate, frequent_tokens, plan
from kangaroo.training.checkpoint import Checkpoint, Progress, begun_with
from kangaroo.training.config import TrainerConfig, schedule
from kangaroo.training.decode import decode, prompts_of
from kangaroo.training.micro_batch import Seen, grade, look, teach
from kangaroo.training.recipe import AdapterRecipe, Trainee, trainees
from kangaroo.training.results import STEPS
from kangaroo.training.work import Work
from kangaroo.utils import memory
from kangaroo.utils.errors import Diverged
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranks import Ranks
from kangaroo.utils.tracking import Tracker

log = logging.getLogger(__name__)


@dataclass
class Run:
    """What a run works with, from its first step or its last checkpoint on.

    Args:
        accumulate: micro-batches of an optimizer step.
        total: optimizer steps.
        prompts: held-out ones to decode.
        frequent_K: what the assistant writes, the most frequent token first.
        about: provenance of the data.
        remembered: what the target computed of each micro-batch, where that is kept.
    """

    lm: LM
    config: TrainerConfig
    ranks: Ranks
    work: Work
    accumulate: int
    total: int
    prompts: list[list[int]]
    frequent_K: Tensor
    trained: list[Trainee]
    backend: backends.TorchBackend
    checkpoint: Checkpoint
    progress: Progress
    about: dict[str, Any]
    remembered: dict[tuple[int, ...], Seen] = field(default_factory=dict)


def train(
    lm: LM,
    samples: Sequence[Sample],
    recipes: Sequence[AdapterRecipe],
    config: TrainerConfig,
    output: Path,
    tracker: Tracker,
    about: dict[str, Any],
    ranks: Ranks | None = None,
) -> list[Path]:
    """Train all adapters, each saved in its own folder under `output`.

    A run that was stopped at any moment goes on from its last checkpoint, and ends with the same
    weights as one that was not, whatever the number of processes before and after.

    Args:
        about: provenance of the data, saved with the adapters.
        ranks: the processes that share the work, all with these arguments; the first one alone
            writes files. None: there is only this one.

    Errors: those of `begin` and `go_on`.
    """
    return go_on(begin(lm, samples, recipes, config, output, about, ranks or Ranks()), tracker)


def go_on(run: Run, tracker: Tracker) -> list[Path]:
    """All steps that are left; see `train`. Errors: `Diverged`."""
    progress, first, output = run.progress, run.trained[0].name, run.checkpoint.folder
    if progress.step:
        log.info("going on after step %d of %d", progress.step, run.total)
    bar = tqdm(
        total=run.total,
        initial=progress.step,
        unit="step",
        desc="training",
        disable=not run.ranks.is_first,
    )
    while progress.step < run.total:
        metrics = _step(run)
        _check_finite(run, [name for name, x in metrics.items() if not math.isfinite(x)])
        with run.backend.averaged():
            metrics |= _measure(run)
        if run.ranks.is_first:
            run.checkpoint.log(progress.step, metrics)
            tracker.log(metrics, progress.step)
        if _due(run, run.config.save_every):
            state = run.backend.state()  # on the host: to look at it costs no time of a device
            _check_finite(run, ["a weight"] if adapter_files.not_finite(state["weights"]) else [])
            if run.ranks.is_first:
                run.checkpoint.save(state, progress)
        bar.update()
        loss, agree = metrics[f"train/{first}/loss"], metrics[f"train/{first}/agreement"]
        bar.set_postfix(loss=f"{loss:.3f}", agree=f"{agree:.3f}")
    bar.close()
    if run.ranks.is_first:
        with run.backend.averaged():
            for trainee in run.trained:
                _save(run, trainee, output / trainee.name)
        curves.write(output)
    return [output / trainee.name for trainee in run.trained]


def begin(
    lm: LM,
    samples: Sequence[Sample],
    recipes: Sequence[AdapterRecipe],
    config: TrainerConfig,
    output: Path,
    about: dict[str, Any],
    ranks: Ranks,
) -> Run:
    """Everything before the first step: what is learnt, by whom, and from where on.

    Errors: `DataError` for a sample without trainable tokens, `ConfigError` where nothing is left
    to train on or `output` holds the checkpoint of other settings.
    """
    config = kept.settled(lm, samples, config, about)
    config, accumulate = settled(config, lm, output, ranks)
    work = Work.of(samples, config)
    if ranks.is_first and accumulate < ranks.world:
        log.warning(
            "trainer.accumulate=%d keeps %d of the %d processes busy, and the others wait. Start "
            "fewer, or begin a new run (output=) without trainer.accumulate.",
            *(accumulate, accumulate, ranks.world),
        )
    # a sharded target is run by all processes at once, and its layers are gathered for every token
    decoded = 0 if config.shard_target else config.decode_prompts
    longest = min(config.max_length, lm.context - config.decode_tokens)
    prompts = prompts_of(work.held_out, decoded, longest, config.decode_tokens)
    frequent_K = frequent_tokens(work.kept)
    vocabulary_K = None if config.vocabulary is None else frequent_K[: config.vocabulary].sort()[0]
    shard_on = ranks.device if config.shard_target else None
    trained = trainees(lm, recipes, vocabulary_K, shard_on, config.seed)
    backend = backends.begin([trainee.adapter for trainee in trained], config, ranks)
    settings = config.identity() | {"adapters": [trainee.settings() for trainee in trained]}
    checkpoint = Checkpoint(output, settings, data=about["fingerprint"])
    progress, state = ranks.share(checkpoint.resume() if ranks.is_first else (Progress(), None))
    if state is not None:
        backend.load_state(state)
    total = math.ceil(len(work.batches) / accumulate)
    return Run(
        *(lm, config, ranks, work, accumulate, total, prompts, frequent_K),
        *(trained, backend, checkpoint, progress, about),
    )


def settled(config: TrainerConfig, lm: LM, output: Path, ranks: Ranks) -> tuple[TrainerConfig, int]:
    """The options with `accumulate` and `loss_chunk` as numbers, and the first of them: the given
    ones, else those of the run in `output`, else one micro-batch for each process, and what suits
    the first process's device.
    """
    accumulate, loss_chunk = config.accumulate, config.loss_chunk
    if accumulate is None or loss_chunk is None:
        begun = begun_with(output) if ranks.is_first else {}
        # a sharded target goes there later
        device = ranks.device if config.shard_target else lm.device
        suiting = config.on(memory.total(device), lm.config.vocab_size).chunk
        made = begun.get("accumulate", ranks.world), begun.get("loss_chunk", suiting)
        shared = ranks.share(made)
        accumulate, loss_chunk = accumulate or shared[0], loss_chunk or shared[1]
    return replace(config, accumulate=accumulate, loss_chunk=loss_chunk), accumulate


def _step(run: Run) -> dict[str, float]:
    """One optimizer step; its metrics."""
    config, work, progress = run.config, run.work, run.progress
    started = running()
    first = progress.step * run.accumulate
    group = work.batches[first : first + run.accumulate]
    # weighted by all positions of the step, so that the mean does not depend on the split
    wanted = max(sum(work.positions[i] for batch in group for i in batch), 1)
    sums = []
    for batch, counts in run.ranks.deal(group):
        seen = run.remembered.get(tuple(batch))
        seen = seen or _look(run.lm, work.kept, batch, config, run.trained)
        if config.remember:
            run.remembered[tuple(batch)] = seen
        grades = teach(run.lm, seen, run.trained, config.chunk, weight=counts / wanted)
        sums.append(results.sums(grades))
        run.backend.collect()
    sums = [own_SF.cpu() for own_SF in sums]  # here: each waits for the device
    sums_SF = torch.stack(run.ranks.merge(sums, len(group))).sum(0)
    share = schedule(config, progress.step, run.total)
    rates = [trainee.recipe.learning_rate or config.learning_rate for trainee in run.trained]
    run.backend.step([share * rate for rate in rates])

    tokens = sum(work.tokens[i] for batch in group for i in batch)
    seconds = running() - started
    progress.seconds += seconds
    progress.step += 1
    progress.tokens += tokens
    progress.assistant_tokens += wanted
    metrics = results.named("train", results.step_names(run.trained), sums_SF) | {
        "tokens": progress.tokens,
        "tokens_per_second": tokens / seconds,
        "peak_memory_gib": memory.peak(run.lm.device) / 2**30,
    }
    for trainee, rate in zip(run.trained, rates, strict=True):
        metrics[f"train/{trainee.name}/learning_rate"] = share * rate
    return metrics


def _check_finite(run: Run, wrong: Sequence[str]) -> None:
    """Stop where something is not finite any more; the last checkpoint has what came before.

    Errors: `Diverged`.
    """
    if wrong:
        fix = "Train anew, with a lower trainer.learning_rate="
        if run.checkpoint.path.exists():
            fix = f"'{run.checkpoint.folder}' keeps the last checkpoint before that. {fix} and "
            fix += "another output="
        raise Diverged(
            f"{wrong[0]} is not finite at step {run.progress.step} of {run.total}: the training "
            f"has diverged. {fix}."
        )


def _due(run: Run, every: int) -> bool:
    """Whether it is time for what is done every so many steps, and once more after the last."""
    return run.progress.step == run.total or run.progress.step % every == 0


def _measure(run: Run) -> dict[str, float]:
    """Held-out results, where they are due."""
    config, progress = run.config, run.progress
    metrics: dict[str, float] = {}
    if _due(run, config.evaluate_every):
        found = evaluate(run.lm, run.trained, run.work.held_out, config, run.ranks)
        progress.held_out, progress.facts = found
        metrics |= progress.held_out
    # one process decodes: the others need nothing of it and wait where they next meet
    if run.prompts and run.ranks.is_first and _due(run, config.decode_every):
        progress.decoded = decode(run.lm, run.trained, run.prompts, config.decode_tokens)
        metrics |= progress.decoded
    return metrics


def evaluate(
    lm: LM,
    trained: Sequence[Trainee],
    samples: Sequence[Sample],
    config: TrainerConfig,
    ranks: Ranks,
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Held-out results of every adapter, `held_out/<name>/<result>`, and by name what its drafter
    has to know (`Trainable.facts`).
    """
    found = []
    lengths = [min(len(sample["input_ids"]), config.max_length) for sample in samples]
    batches = plan(lengths, config.batch_tokens, seed=0, epoch=0, packing=config.packing)
    for batch, _ in ranks.deal(batches):
        seen = _look(lm, samples, batch, config, trained)
        grades, tallies = grade(lm, seen, trained, config.chunk, STEPS)
        accepted = [
            results.accepted(own, seen.tokens.wanted_BT, trainee.recipe.architecture.longest(STEPS))
            for trainee, own in zip(trained, grades, strict=True)
        ]
        found.append((results.sums(grades).cpu(), torch.stack(accepted).cpu(), tallies))
    all_sums, all_accepted, all_tallies = zip(*ranks.merge(found, len(batches)), strict=True)
    sums_SF, accepted_AW = torch.stack(all_sums).sum(0), torch.stack(all_accepted).sum(0)
    facts = {
        trainee.name: trainee.adapter.facts(torch.stack(own).sum(0))
        for trainee, own in zip(trained, zip(*all_tallies, strict=True), strict=True)
    }
    return results.held_out(trained, sums_SF, accepted_AW), facts


def _look(
    lm: LM,
    samples: Sequence[Sample],
    batch: list[int],
    config: TrainerConfig,
    trained: Sequence[Trainee],
) -> Seen:
    chosen = [samples[i] for i in batch]
    tokens = collate(chosen, config.max_length, lm.device, config.packing, bool(config.kept))
    return look(lm, tokens, trained, config.chunk)


def _save(run: Run, trainee: Trainee, folder: Path) -> None:
    def mine(metrics: dict[str, float], prefix: str) -> dict[str, float]:
        own = f"{prefix}/{trainee.name}/"
        return {k.removeprefix(own): v for k, v in metrics.items() if k.startswith(own)}

    progress = asdict(run.progress) | {
        "held_out": mine(run.progress.held_out, "held_out"),
        "decoded": mine(run.progress.decoded, "decode"),
    }
    facts = progress.pop("facts")[trainee.name]
    training = {
        "adapter": trainee.settings(),
        "trainer": asdict(run.config),
        "progress": progress,
        "data": run.about,
        "processes": run.ranks.world,
    } | provenance()
    vocabulary_K = trainee.vocabulary_K  # smaller than asked for if the data has fewer tokens
    size = None if vocabulary_K is None else len(vocabulary_K)
    described = adapter_files.describe(run.lm, trainee.adapter, training, size, facts)
    dtype = adapter_files.kept_dtype(trainee.adapter, run.lm)
    adapter_files.save(trainee.adapter, described, run.frequent_K, folder, dtype)
