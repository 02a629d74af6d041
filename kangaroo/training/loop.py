"""Train adapters on a frozen target: one forward of the target gives inputs and teacher for all.

Shapes: S draft steps of all adapters, F results of each, A adapters, W draft tokens, K draft
vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kangaroo.engine.clock import running
from kangaroo.heads import adapter_files
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.training import curves, results
from kangaroo.training.backend import DeepSpeedBackend, TorchBackend
from kangaroo.training.batches import Work, collate, frequent_tokens, lengths_of, plan
from kangaroo.training.checkpoint import Checkpoint, Progress, begun_with
from kangaroo.training.config import TrainerConfig, loss_chunk_of, schedule
from kangaroo.training.decode import decode, prompts_of
from kangaroo.training.micro_batch import TargetOutputs, forward_target, grade, train_step
from kangaroo.training.recipe import AdapterRecipe, Trainee, trainees
from kangaroo.training.results import STEPS
from kangaroo.utils import memory
from kangaroo.utils.errors import ConfigError, Diverged
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranks import Ranks
from kangaroo.utils.tracking import NoTracker

log = logging.getLogger(__name__)


class Trainer:
    """A run, from its first step or its last checkpoint on.

    One that was stopped at any moment ends with the same weights as one that was not, whatever the
    number of processes before and after.

    Args:
        output: each adapter is saved in a folder of its own there.
        about: provenance of the data, saved with the adapters.
        ranks: the processes that share the work; the first one alone writes files.

    Errors: `DataError` for a sample without trainable tokens, `ConfigError` where nothing is left
    to train on or `output` holds the checkpoint of other settings.
    """

    def __init__(
        self,
        lm: TargetModel,
        samples: Sequence[Sample],
        recipes: Sequence[AdapterRecipe],
        config: TrainerConfig,
        output: Path,
        about: dict[str, Any],
        ranks: Ranks | None = None,
    ):
        self.lm, self.about, self.ranks = lm, about, ranks or Ranks()
        stored = uses_stored_logits(lm, samples, config, about)
        config = replace(config, use_stored_logits=stored)
        self.config = config = resolve_options(config, lm, output, self.ranks)
        self.accumulate = config.accumulate or 1
        self.work = Work(samples, config)
        self.total = math.ceil(len(self.work.batches) / self.accumulate)  # optimizer steps
        # a sharded target is run by all processes at once, and gathers its layers for every token
        decoded = 0 if config.shard_target else config.decode_prompts
        longest = min(config.max_length, lm.context - config.decode_tokens)
        self.prompts = prompts_of(self.work.held_out, decoded, longest, config.decode_tokens)
        # what the assistant writes, the most frequent token first
        self.frequent_K = frequent_tokens(self.work.training)
        size = config.vocabulary
        vocabulary_K = None if size is None else self.frequent_K[:size].sort()[0]
        shard_on = self.ranks.device if config.shard_target else None
        self.trained = trainees(lm, recipes, vocabulary_K, shard_on, config.seed)
        adapters = [trainee.adapter for trainee in self.trained]
        backend = DeepSpeedBackend if config.zero_stage else TorchBackend
        self.backend = backend(adapters, config, self.ranks)
        settings = config.identity() | {"adapters": [x.settings() for x in self.trained]}
        self.checkpoint = Checkpoint(output, settings, data=about["fingerprint"])
        resumed = self.checkpoint.resume() if self.ranks.is_first else (Progress(), None)
        self.progress, state = self.ranks.broadcast(resumed)
        if state is not None:
            self.backend.load_state(state)
        self.target_states: dict[tuple[int, ...], TargetOutputs] = {}  # where they are cached

    def train(self, tracker: NoTracker) -> list[Path]:
        """All steps that are left; the folders of the adapters. Errors: `Diverged`."""
        progress, output, is_first = self.progress, self.checkpoint.folder, self.ranks.is_first
        if progress.step:
            log.info("going on after step %d of %d", progress.step, self.total)
        shown = {"unit": "step", "desc": "training", "disable": not is_first}
        bar = tqdm(total=self.total, initial=progress.step, **shown)
        while progress.step < self.total:
            metrics = self._step()
            if broken := [name for name, value in metrics.items() if not math.isfinite(value)]:
                raise self._diverged(broken[0])
            metrics |= self._measure()
            if is_first:
                self.checkpoint.log(progress.step, metrics)
                tracker.log(metrics, progress.step)
            if self._is_due(self.config.save_every):
                state = self.backend.state()  # on the host: to look at it costs a device no time
                if adapter_files.not_finite(state["weights"]) is not None:
                    raise self._diverged("a weight")
                if is_first:
                    self.checkpoint.save(state, progress)
            bar.update()
            bar.set_postfix(loss=f"{metrics[f'train/{self.trained[0].name}/loss']:.3f}")
        bar.close()
        if is_first:
            for trainee in self.trained:
                self._save(trainee, output / trainee.name)
            curves.write(output)
        return [output / trainee.name for trainee in self.trained]

    def _step(self) -> dict[str, float]:
        """One optimizer step; its metrics."""
        config, work, progress, trained = self.config, self.work, self.progress, self.trained
        started = running()
        first = progress.step * self.accumulate
        group = work.batches[first : first + self.accumulate]
        # weighted by all positions of the step, so that the mean does not depend on the split
        positions = max(sum(work.positions[i] for batch in group for i in batch), 1)
        sums = []
        for batch, counts in self.ranks.scatter(group):
            outputs = self.target_states.get(tuple(batch)) or self._look_at(work.training, batch)
            if config.cache_target_states:
                self.target_states[tuple(batch)] = outputs
            weight = counts / positions
            sums.append(results.sums(train_step(self.lm, outputs, trained, config.chunk, weight)))
            self.backend.collect()
        sums = [x_SF.cpu() for x_SF in sums]  # here: each waits for the device
        sums_SF = torch.stack(self.ranks.gather(sums, len(group))).sum(0)
        share = schedule(config, progress.step, self.total)
        rates = [share * (x.recipe.learning_rate or config.learning_rate) for x in trained]
        self.backend.step(rates)

        tokens, seconds = sum(work.tokens[i] for b in group for i in b), running() - started
        progress.seconds += seconds
        progress.step += 1
        progress.tokens += tokens
        progress.assistant_tokens += positions
        metrics = results.named("train", trained, [x.recipe.steps for x in trained], sums_SF)
        metrics |= {"tokens": progress.tokens, "tokens_per_second": tokens / seconds}
        metrics["peak_memory_gib"] = memory.peak(self.lm.device) / 2**30
        named = zip(trained, rates, strict=True)
        return metrics | {f"train/{x.name}/learning_rate": rate for x, rate in named}

    def _look_at(self, samples: Sequence[Sample], batch: Sequence[int]) -> TargetOutputs:
        """The frozen forward of a micro-batch."""
        chosen, stored = [samples[i] for i in batch], bool(self.config.use_stored_logits)
        tokens = collate(chosen, self.config.max_length, self.lm.device, stored)
        return forward_target(self.lm, tokens, self.trained, self.config.chunk)

    def _diverged(self, what: str) -> Diverged:
        """The error where something is not finite any more."""
        fix = "Train anew, with a lower trainer.learning_rate="
        if self.checkpoint.path.exists():
            fix = f"'{self.checkpoint.folder}' keeps the last checkpoint before that. {fix} and "
            fix += "another output="
        return Diverged(
            f"{what} is not finite at step {self.progress.step} of {self.total}: the training has "
            f"diverged. {fix}."
        )

    def _is_due(self, every: int) -> bool:
        """Whether it is time for what is done every so many steps, and again after the last."""
        return self.progress.step == self.total or self.progress.step % every == 0

    def _measure(self) -> dict[str, float]:
        """Held-out results, where they are due."""
        config, progress = self.config, self.progress
        metrics: dict[str, float] = {}
        if self._is_due(config.evaluate_every):
            progress.held_out, progress.facts = self.evaluate()
            metrics |= progress.held_out
        # one process decodes: the others need nothing of it and wait where they next meet
        if self.prompts and self.ranks.is_first and self._is_due(config.decode_every):
            progress.decoded = decode(self.lm, self.trained, self.prompts, config.decode_tokens)
            metrics |= progress.decoded
        return metrics

    def evaluate(self) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """Held-out results of every adapter, `held_out/<name>/<result>`, and by name what its
        drafter has to know (`Trainable.facts`)."""
        config, samples, trained = self.config, self.work.held_out, self.trained
        batches = plan(lengths_of(samples, config.max_length), config.batch_tokens, seed=0, epoch=0)
        measured = []
        for batch, _ in self.ranks.scatter(batches):
            outputs = self._look_at(samples, batch)
            students, tallies = grade(self.lm, outputs, trained, config.chunk, STEPS)
            wanted_BT = outputs.tokens.wanted_BT
            accepted = [
                results.accepted(steps, wanted_BT, trainee.recipe.architecture.own_steps or STEPS)
                for trainee, steps in zip(trained, students, strict=True)
            ]
            measured.append((results.sums(students).cpu(), torch.stack(accepted).cpu(), tallies))
        sums, counts, tallied = zip(*self.ranks.gather(measured, len(batches)), strict=True)
        of_each = zip(trained, zip(*tallied, strict=True), strict=True)
        facts = {x.name: x.adapter.facts(torch.stack(tally).sum(0)) for x, tally in of_each}
        sums_SF, accepted_AW = torch.stack(sums).sum(0), torch.stack(counts).sum(0)
        return results.held_out(trained, sums_SF, accepted_AW), facts

    def _save(self, trainee: Trainee, folder: Path) -> None:
        progress, name = asdict(self.progress), trainee.name
        facts = progress.pop("facts")[name]
        progress["held_out"] = results.below(progress["held_out"], f"held_out/{name}/")
        progress["decoded"] = results.below(progress["decoded"], f"decode/{name}/")
        training = {
            "adapter": trainee.settings(),
            "trainer": asdict(self.config),
            "progress": progress,
            "data": self.about,
            "processes": self.ranks.world,
        } | provenance()
        # smaller than asked for if the data has fewer tokens
        size = None if trainee.vocabulary_K is None else len(trainee.vocabulary_K)
        described = adapter_files.describe(self.lm, trainee.adapter, training, size, facts)
        dtype = adapter_files.kept_dtype(trainee.adapter, self.lm)
        adapter_files.save(trainee.adapter, described, self.frequent_K, folder, dtype)


def uses_stored_logits(
    lm: TargetModel, samples: Sequence[Sample], config: TrainerConfig, about: dict[str, Any]
) -> bool:
    """The option `use_stored_logits`, of which None is true if nothing speaks against it.

    Errors: `ConfigError` where it is true and cannot be.
    """
    if config.use_stored_logits is False:
        return False
    model = (about.get("teacher") or {"model": lm.name})["model"]
    if all("teacher" in sample for sample in samples) and model == lm.name:
        log.info("learning from kept distributions: the target runs as far as adapters read")
        return True
    if config.use_stored_logits:
        raise ConfigError(
            f"trainer.use_stored_logits=true: this dataset has no kept distributions of '{lm.name}'"
            f"{'' if model == lm.name else f' but of {model!r}'}. Let it write its own with "
            "data.teacher=32 (and another data.path=), or leave trainer.use_stored_logits out."
        )
    return False


def resolve_options(
    config: TrainerConfig, lm: TargetModel, output: Path, ranks: Ranks
) -> TrainerConfig:
    """The options with `accumulate` and `loss_chunk` as numbers: the given ones, else those of the
    run in `output`, else one micro-batch for each process, and what suits the first one's device.
    """
    begun = begun_with(output) if ranks.is_first else {}
    # a sharded target goes there later
    device = ranks.device if config.shard_target else lm.device
    suiting = loss_chunk_of(memory.total(device), lm.config.vocab_size)
    usual = begun.get("accumulate", ranks.world), begun.get("loss_chunk", suiting)
    accumulate, chunk = ranks.broadcast(usual)
    accumulate, chunk = config.accumulate or accumulate, config.loss_chunk or chunk
    return replace(config, accumulate=accumulate, loss_chunk=chunk)
