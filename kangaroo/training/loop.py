"""Train adapters on a frozen target: one forward of the target gives inputs and teacher for all.

Shapes: S draft steps of an adapter, F results of each, W draft tokens, K draft vocabulary.
"""

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kangaroo.engine.clock import running
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.training import batches, recipe, results
from kangaroo.training.backend import DeepSpeedBackend, TorchBackend
from kangaroo.training.recipe import AdapterRecipe, Trainee, TrainerConfig
from kangaroo.utils import memory
from kangaroo.utils.errors import ConfigError, CorruptFile, Diverged
from kangaroo.utils.provenance import changes, provenance
from kangaroo.utils.ranks import ALONE, Ranks
from kangaroo.utils.tracking import NoTracker

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"  # whole or not there, so that kill -9 loses little
GIVE_BACK_EVERY = 10  # steps, of seconds each, where it takes a third of one


@dataclass
class Progress:
    """How far a run has come, and its last results, by name."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # read by the target
    assistant_tokens: int = 0  # positions that entered the loss
    seconds: float = 0.0  # of the optimizer steps, on the machine's clock
    held_out: dict[str, float] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each adapter's drafter
    decoded: dict[str, float] = field(default_factory=dict)


class Trainer:
    """A run, from its first step or its last checkpoint on. One that was stopped at any moment ends
    with the same weights as one that was not, whatever the number of processes before and after.

    Args:
        output: each adapter is saved in a folder of its own there, by the first process.
        about: provenance of the data, saved with the adapters.

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
        ranks: Ranks = ALONE,
    ):
        self.lm, self.output, self.about, self.ranks = lm, output, about, ranks
        saved = self.ranks.broadcast(load_checkpoint(output) if self.ranks.is_first else {})
        stored = uses_stored_logits(lm, samples, config, about)
        sizes = resolve_sizes(config, lm, saved.get("identity", {}), self.ranks)
        self.accumulate, self.chunk = sizes
        config = replace(config, accumulate=sizes[0], loss_chunk=sizes[1], use_stored_logits=stored)
        self.config, self.work = config, batches.Work(samples, config)
        self.total = math.ceil(len(self.work.batches) / self.accumulate)  # optimizer steps
        self.prompts = results.prompts_of(self.work.held_out, config, lm.context)
        self.frequent_K = batches.frequent_tokens(self.work.training)
        size = config.vocabulary
        vocabulary_K = None if size is None else self.frequent_K[:size].sort()[0]
        shard_on = self.ranks.device if config.shard_target else None
        self.trained = recipe.trainees(lm, recipes, vocabulary_K, shard_on, config.seed)
        adapters = [trainee.adapter for trainee in self.trained]
        backend = DeepSpeedBackend if config.zero_stage else TorchBackend
        self.backend = backend(adapters, config, self.ranks)
        settings = config.identity() | {"adapters": [x.settings() for x in self.trained]}
        self.identity = json.loads(json.dumps(settings | {"data": about["fingerprint"]}))
        if saved and (changed := changes(saved["identity"], self.identity)):
            raise ConfigError(
                f"'{output}' holds a run with other settings ({changed}). Go on with the same "
                "ones, pass output= another folder, or delete it."
            )
        self.progress = Progress(**saved.get("progress", {}))
        if saved:
            self.backend.load_state(saved["backend"])
        # where they are cached
        self.target_states: dict[tuple[int, ...], batches.TargetOutputs] = {}

    def train(self, tracker: NoTracker) -> list[Path]:
        """All steps that are left; the folders of the adapters. Errors: `Diverged`."""
        progress, is_first = self.progress, self.ranks.is_first
        if progress.step:
            log.info("going on after step %d of %d", progress.step, self.total)
        if is_first:
            self.output.mkdir(parents=True, exist_ok=True)
            rows = results.read_metrics(self.output)  # those of later steps are done again
            lines = [json.dumps(row) + "\n" for row in rows if row["step"] <= progress.step]
            (self.output / results.METRICS).write_text("".join(lines))
        steps = range(progress.step, self.total)
        shown = {"initial": progress.step, "total": self.total, "unit": "step", "desc": "training"}
        for _ in (bar := tqdm(steps, **shown, disable=not is_first)):
            metrics = self._step()
            if broken := [name for name, value in metrics.items() if not math.isfinite(value)]:
                raise self._diverged(broken[0])
            metrics |= self._measure()
            if is_first:
                with (self.output / results.METRICS).open("a") as file:
                    file.write(json.dumps({"step": progress.step} | metrics) + "\n")
                tracker.log(metrics, progress.step)
            if self._is_due(self.config.save_every):
                state = self.backend.state()  # on the host: to look at it costs a device no time
                if adapter_files.not_finite(state["weights"]) is not None:
                    raise self._diverged("a weight")
                if is_first:
                    self._save_checkpoint(state)
            bar.set_postfix(loss=f"{metrics[f'train/{self.trained[0].name}/loss']:.3f}")
        if is_first:
            for trainee in self.trained:
                self._save(trainee)
            results.write_curves(self.output)
        return [self.output / trainee.name for trainee in self.trained]

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
            students = batches.train_step(self.lm, outputs, trained, self.chunk, counts / positions)
            sums.append([torch.stack([x.sums_F for x in steps]) for steps in students])
            self.backend.collect()
        sums = [[x_SF.cpu() for x_SF in each] for each in sums]  # here: each waits for the device
        sums = self.ranks.gather(sums, len(group))
        share = recipe.schedule(config, progress.step, self.total)
        rates = [share * (x.recipe.learning_rate or config.learning_rate) for x in trained]
        self.backend.step(rates)

        tokens, seconds = sum(work.tokens[i] for b in group for i in b), running() - started
        progress.seconds += seconds
        progress.step += 1
        if progress.step % GIVE_BACK_EVERY == 0 and self.lm.device.type == "cpu":
            memory.give_back()
        progress.tokens += tokens
        progress.assistant_tokens += positions
        metrics = {"tokens": progress.tokens, "tokens_per_second": tokens / seconds}
        metrics["peak_memory_gib"] = memory.peak(self.lm.device) / 2**30
        for trainee, rate, of_each in zip(trained, rates, zip(*sums, strict=True), strict=True):
            prefix = f"train/{trainee.name}"
            metrics |= results.means(prefix, torch.stack(of_each).sum(0))
            metrics[f"{prefix}/learning_rate"] = rate
        return metrics

    def _look_at(self, samples: Sequence[Sample], batch: Sequence[int]) -> batches.TargetOutputs:
        chosen, stored = [samples[i] for i in batch], bool(self.config.use_stored_logits)
        tokens = batches.collate(chosen, self.config.max_length, self.lm.device, stored)
        return batches.forward_target(self.lm, tokens, self.trained)

    def _diverged(self, what: str) -> Diverged:
        has_saved = (self.output / CHECKPOINT).exists()
        kept = f"'{self.output}' keeps the last checkpoint before that. " if has_saved else ""
        return Diverged(
            f"{what} is not finite at step {self.progress.step} of {self.total}: the training has "
            f"diverged. {kept}Train anew, with a lower trainer.learning_rate="
            f"{' and another output=' if has_saved else ''}."
        )

    def _is_due(self, every: int) -> bool:
        """Whether it is time for what is done every so many steps, and after the last."""
        return self.progress.step == self.total or self.progress.step % every == 0

    def _measure(self) -> dict[str, float]:
        config, progress = self.config, self.progress
        metrics: dict[str, float] = {}
        if self._is_due(config.evaluate_every):
            progress.held_out, progress.facts = self.evaluate()
            metrics |= progress.held_out
        # one process decodes: the others need nothing of it and wait where they next meet
        if self.prompts and self.ranks.is_first and self._is_due(config.decode_every):
            how = self.lm, self.trained, self.prompts, config.decode_tokens
            progress.decoded = results.decode(*how)
            metrics |= progress.decoded
        return metrics

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """Held-out results of every adapter, `held_out/<name>/<result>`, and by name what its
        drafter has to know (`Trainable.facts`)."""
        config, samples = self.config, self.work.held_out
        lengths = batches.lengths_of(samples, config.max_length)
        plan = batches.plan(lengths, config.batch_tokens, seed=0, epoch=0)
        measured: list[list[tuple[Tensor, Tensor, Tensor]]] = []
        for batch, _ in self.ranks.scatter(plan):
            outputs = self._look_at(samples, batch)
            students = batches.grade(self.lm, outputs, self.trained, self.chunk, results.STEPS)
            measured.append([])
            for trainee, steps in zip(self.trained, students, strict=True):
                longest = trainee.recipe.architecture.fixed_steps or results.STEPS
                accepted = results.accepted(steps, outputs.wanted_BT, longest)
                top_M = outputs.distributions.top_M
                tally = trainee.adapter.tally(trainee.heads, *batches.together(steps), top_M)
                sums_SF = torch.stack([x.sums_F for x in steps])
                measured[-1].append((sums_SF.cpu(), accepted.cpu(), tally))
        metrics: dict[str, float] = {}
        facts: dict[str, dict[str, Any]] = {}
        gathered = zip(*self.ranks.gather(measured, len(plan)), strict=True)
        for trainee, of_each in zip(self.trained, gathered, strict=True):
            sums_SF, accepted_W, tally = (torch.stack(x).sum(0) for x in zip(*of_each, strict=True))
            metrics |= results.held_out(f"held_out/{trainee.name}", sums_SF, accepted_W)
            facts[trainee.name] = trainee.adapter.facts(tally)
        return metrics, facts

    def _save_checkpoint(self, state: dict[str, Any]) -> None:
        path, progress = self.output / CHECKPOINT, asdict(self.progress)
        part = path.with_suffix(".part")
        torch.save({"identity": self.identity, "backend": state, "progress": progress}, part)
        os.replace(part, path)

    def _save(self, trainee: Trainee) -> None:
        progress, name = asdict(self.progress), trainee.name
        facts = progress.pop("facts")[name]
        if isinstance(trainee.adapter, Adapter):  # EAGLE's head needs the first tokens
            reach = batches.reach_of(batches.lengths_of(self.work.training, self.config.max_length))
            facts |= {"attention_window": reach}
        for part, prefix in (("held_out", f"held_out/{name}/"), ("decoded", f"decode/{name}/")):
            values = progress[part].items()
            progress[part] = {k[len(prefix) :]: v for k, v in values if k.startswith(prefix)}
        training = {
            "adapter": trainee.settings(),
            "trainer": asdict(self.config),
            "progress": progress,
            "data": self.about,
            "processes": self.ranks.world,
        } | provenance()
        # smaller than asked for if the data has fewer tokens
        size = None if trainee.vocabulary_K is None else len(trainee.vocabulary_K)
        described = adapter_files.describe(
            self.lm, trainee.adapter, training, vocabulary=size, facts=facts
        )
        dtype = adapter_files.saved_dtype(trainee.adapter, self.lm)
        adapter_files.save(trainee.adapter, described, self.frequent_K, self.output / name, dtype)


def uses_stored_logits(
    lm: TargetModel, samples: Sequence[Sample], config: TrainerConfig, about: dict[str, Any]
) -> bool:
    """The option `use_stored_logits`, of which None is true if nothing speaks against it. Errors:
    `ConfigError` where it is true and cannot be."""
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


def resolve_sizes(
    config: TrainerConfig, lm: TargetModel, begun: dict[str, Any], ranks: Ranks
) -> tuple[int, int]:
    """The options `accumulate` and `loss_chunk`: the given ones, else those that a run was `begun`
    with, else one micro-batch for each process, and what suits the first one's device."""
    # a sharded target goes there later
    device = ranks.device if config.shard_target else lm.device
    suiting = ranks.broadcast(recipe.loss_chunk_of(memory.total(device), lm.config.vocab_size))
    accumulate = config.accumulate or begun.get("accumulate", ranks.world)
    return accumulate, config.loss_chunk or begun.get("loss_chunk", suiting)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The settings and data of a run, its backend's `state()` and its progress as they were last
    saved, by name; empty where they were not. Errors: `CorruptFile`."""
    path = folder / CHECKPOINT
    try:
        return torch.load(path, weights_only=True) if path.exists() else {}
    except (RuntimeError, EOFError, OSError) as error:
        raise CorruptFile(
            f"checkpoint '{path}' cannot be read ({error}); delete it to train anew."
        ) from error
