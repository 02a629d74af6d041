"""Train adapters on a frozen target, with one forward of the target for all of them.

Shapes: S draft steps of an adapter, F results of each, W draft tokens, K draft vocabulary.
"""

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kangaroo.engine.clock import running
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.training import batches, recipe, results
from kangaroo.training.backend import DeepSpeedBackend, TorchBackend
from kangaroo.training.recipe import AdapterRecipe, Trainee, TrainerConfig
from kangaroo.training.targets import shard
from kangaroo.utils import memory
from kangaroo.utils.errors import ConfigError, CorruptFile, Diverged, explained
from kangaroo.utils.provenance import check_same, provenance
from kangaroo.utils.ranks import ALONE, Ranks, default_device
from kangaroo.utils.terminal import progress_bar
from kangaroo.utils.tracking import NoTracker

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"  # appears whole, so that kill -9 loses little
FROM_RUN = "accumulate", "loss_chunk", "use_stored_logits"  # a run decides on what is not given
# no weight depends on these
NOT_IN_IDENTITY = "evaluate_every", "save_every", "zero_stage", "shard_target"
GIVE_BACK_EVERY = 10  # steps of some seconds; giving memory back takes a third of a second


@dataclass
class Progress:
    """The progress of a run, and its last results by name."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # read by the target
    assistant_tokens: int = 0  # positions that entered the loss
    seconds: float = 0.0  # spent on optimizer steps
    held_out: dict[str, float] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by adapter (`Trainable.facts`)


class Trainer:
    """A run, from its first step or its last checkpoint on. On CPUs one that was interrupted ends
    with the same weights as one that was not, even if the number of processes changes. The first
    process saves each adapter in a folder of `output`, with `data`, the provenance of the samples.
    Errors: `DataError` for a sample without trainable tokens, `ConfigError` if nothing is left to
    train on or `output` has the checkpoint of other settings."""

    def __init__(
        self,
        lm: TargetModel,
        samples: Sequence[Sample],
        recipes: Sequence[AdapterRecipe],
        config: TrainerConfig,
        output: Path,
        data: dict[str, Any],
        ranks: Ranks = ALONE,
    ):
        self.lm = lm
        self.output = output
        self.data = data
        self.ranks = ranks
        saved = ranks.broadcast(load_checkpoint(output) if ranks.is_first else {})
        stored = uses_stored_logits(lm, samples, config, data)
        self.accumulate, self.chunk = resolve_sizes(config, lm, saved.get("identity", {}), ranks)
        config = replace(
            config, accumulate=self.accumulate, loss_chunk=self.chunk, use_stored_logits=stored
        )
        self.config = config
        self.work = batches.Work(samples, config)
        self.total = math.ceil(len(self.work.batches) / self.accumulate)  # optimizer steps
        self.frequent_K = batches.frequent_tokens(self.work.training)
        size = config.vocabulary
        if size is not None and size > len(self.frequent_K):
            most = len(self.frequent_K)
            log.info(f"trainer.vocabulary={size}: the assistant wrote only {most} different tokens")
        vocabulary_K = None if size is None else self.frequent_K[:size].sort()[0]
        spread = partial(shard, lm, default_device(), ranks) if config.shard_target else None
        self.trainees = recipe.trainees(lm, recipes, vocabulary_K, spread, config.seed)
        backend = DeepSpeedBackend if config.zero_stage else TorchBackend
        self.backend = backend([trainee.adapter for trainee in self.trainees], config, ranks)
        self.identity = identity(config, [x.recipe for x in self.trainees])
        self.identity["data"] = data["fingerprint"]
        self.progress = Progress(**saved.get("progress", {}))
        if saved:
            check_same(output, saved["identity"], self.identity, "output=")
            self.backend.load_state(saved["backend"])

    def train(self, tracker: NoTracker) -> list[Path]:
        """Take all remaining steps and return the adapters' folders. Errors: `Diverged`."""
        progress = self.progress
        is_first = self.ranks.is_first
        if progress.step:
            log.info("going on after step %d of %d", progress.step, self.total)
        if is_first:
            self.output.mkdir(parents=True, exist_ok=True)
            rows = results.read_metrics(self.output)  # without steps after the checkpoint
            lines = [json.dumps(row) + "\n" for row in rows if row["step"] <= progress.step]
            (self.output / results.METRICS).write_text("".join(lines))
        steps = range(progress.step, self.total)
        shown = {"initial": progress.step, "total": self.total, "unit": "step", "desc": "training"}
        bar = progress_bar(steps, **shown, disable=not is_first)
        for _ in bar:
            metrics = self._step()
            diverged = [name for name, value in metrics.items() if not math.isfinite(value)]
            if diverged:
                raise self._diverged(diverged[0])
            if self._is_due(self.config.evaluate_every):
                progress.held_out, progress.facts = self.evaluate()
                metrics |= progress.held_out
            if is_first:
                with (self.output / results.METRICS).open("a") as file:
                    file.write(json.dumps({"step": progress.step} | metrics) + "\n")
                tracker.log(metrics, progress.step)
            if self._is_due(self.config.save_every):
                state = self.backend.state()  # on the host, so the check does not delay a GPU
                if adapter_files.not_finite(state["weights"]) is not None:
                    raise self._diverged("a weight")
                if is_first:
                    self._save_checkpoint(state)
            loss = metrics[f"train/{self.trainees[0].name}/loss"]
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        if is_first:
            for trainee in self.trainees:
                self._save(trainee)
        return [self.output / trainee.name for trainee in self.trainees]

    def _step(self) -> dict[str, float]:
        work = self.work
        progress = self.progress
        start = running()
        first = progress.step * self.accumulate
        group = work.batches[first : first + self.accumulate]
        # weighted by all positions of the step, so that the mean does not depend on the split
        positions = max(sum(work.positions[i] for batch in group for i in batch), 1)
        sums = []
        for batch, counts in self.ranks.scatter(group):
            outputs = self._run_target(work.training, batch)
            students = batches.train_step(
                self.lm, outputs, self.trainees, loss_chunk=self.chunk, weight=counts / positions
            )
            sums.append([torch.stack([x.sums_F for x in steps]) for steps in students])
            self.backend.collect()
        # only now, since each copy waits for the device
        sums = [[sums_SF.cpu() for sums_SF in batch_sums] for batch_sums in sums]
        sums = self.ranks.gather(sums, len(group))
        share = recipe.schedule(self.config, progress.step, self.total)
        usual = self.config.learning_rate
        rates = [share * (x.recipe.learning_rate or usual) for x in self.trainees]
        self.backend.step(rates)

        tokens = sum(work.tokens[i] for b in group for i in b)
        seconds = running() - start
        progress.seconds += seconds
        progress.step += 1
        progress.tokens += tokens
        progress.assistant_tokens += positions
        if progress.step % GIVE_BACK_EVERY == 0 and self.lm.device.type == "cpu":
            memory.give_back()
        metrics = {"tokens": progress.tokens, "tokens_per_second": tokens / seconds}
        metrics["peak_memory_gib"] = memory.peak(self.lm.device) / 2**30
        by_trainee = zip(*sums, strict=True)
        for trainee, rate, step_sums in zip(self.trainees, rates, by_trainee, strict=True):
            prefix = f"train/{trainee.name}"
            metrics |= results.mean_metrics(prefix, torch.stack(step_sums).sum(0))
            metrics[f"{prefix}/learning_rate"] = rate
        return metrics

    def _run_target(self, samples: Sequence[Sample], batch: Sequence[int]) -> batches.TargetOutputs:
        tokens = batches.collate(
            [samples[i] for i in batch],
            self.config.max_length,
            self.lm.device,
            stored=bool(self.config.use_stored_logits),
        )
        return batches.forward_target(self.lm, tokens, self.trainees)

    def _diverged(self, quantity: str) -> Diverged:
        has_saved = (self.output / CHECKPOINT).exists()
        kept = f"'{self.output}' keeps the last checkpoint before that. " if has_saved else ""
        return Diverged(
            f"{quantity} is not finite at step {self.progress.step} of {self.total}: the training "
            f"has diverged. {kept}Train anew, with a lower trainer.learning_rate="
            f"{' and another output=' if has_saved else ''}."
        )

    def _is_due(self, interval: int) -> bool:
        """Whether to do now what is done every `interval` steps and after the last step."""
        return self.progress.step == self.total or self.progress.step % interval == 0

    @torch.no_grad()
    def evaluate(self) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """Held-out metrics of every adapter, and the facts for its drafter (`Trainable.facts`)."""
        lengths = batches.clipped_lengths(self.work.held_out, self.config.max_length)
        plan = batches.plan(lengths, self.config.batch_tokens, seed=0, epoch=0)
        counted: list[list[tuple[Tensor, Tensor, Tensor]]] = []
        for batch, _ in self.ranks.scatter(plan):
            outputs = self._run_target(self.work.held_out, batch)
            students = batches.grade(
                self.lm, outputs, self.trainees, loss_chunk=self.chunk, most=results.STEPS
            )
            counted.append([])
            for trainee, steps in zip(self.trainees, students, strict=True):
                most = trainee.recipe.architecture.fixed_steps or results.STEPS
                accepted_W = results.count_accepted(steps, outputs.learnt_BT, most)
                top_M = outputs.distributions.top_M
                tally = trainee.adapter.tally(trainee.heads, *batches.stack_steps(steps), top_M)
                sums_SF = torch.stack([x.sums_F for x in steps])
                counted[-1].append((sums_SF.cpu(), accepted_W.cpu(), tally))
        metrics: dict[str, float] = {}
        facts: dict[str, dict[str, Any]] = {}
        gathered = zip(*self.ranks.gather(counted, len(plan)), strict=True)
        for trainee, parts in zip(self.trainees, gathered, strict=True):
            sums_SF, accepted_W, tally = (torch.stack(x).sum(0) for x in zip(*parts, strict=True))
            metrics |= results.held_out_metrics(f"held_out/{trainee.name}", sums_SF, accepted_W)
            facts[trainee.name] = trainee.adapter.facts(tally)
        return metrics, facts

    def _save_checkpoint(self, state: dict[str, Any]) -> None:
        path = self.output / CHECKPOINT
        part = path.with_suffix(".part")
        progress = asdict(self.progress)
        torch.save({"identity": self.identity, "backend": state, "progress": progress}, part)
        os.replace(part, path)

    def _save(self, trainee: Trainee) -> None:
        progress = asdict(self.progress)
        name = trainee.name
        facts = progress.pop("facts")[name]
        if isinstance(trainee.adapter, Adapter):  # EAGLE's head needs the first tokens
            facts["attention_window"] = batches.attention_reach(self.work.tokens)
        prefix = f"held_out/{name}/"
        held_out = progress["held_out"].items()
        progress["held_out"] = {k[len(prefix) :]: v for k, v in held_out if k.startswith(prefix)}
        training = {
            "adapter": trainee.recipe.settings(),
            "trainer": asdict(self.config),
            "progress": progress,
            "data": self.data,
            "processes": self.ranks.world,
        } | provenance()
        vocabulary_K = trainee.heads[0].vocabulary_K
        # smaller than asked for if the data has fewer tokens
        size = None if vocabulary_K is None else len(vocabulary_K)
        adapter_config = adapter_files.describe(
            self.lm, trainee.adapter, training, vocabulary=size, facts=facts
        )
        adapter_files.save(
            trainee.adapter,
            adapter_config,
            self.frequent_K,
            folder=self.output / name,
            dtype=adapter_files.saved_dtype(trainee.adapter, self.lm),
        )


def identity(config: TrainerConfig, recipes: Sequence[AdapterRecipe]) -> dict[str, Any]:
    """What a run's weights depend on, but for its data, with a recipe for each adapter."""
    settings = {k: v for k, v in asdict(config).items() if k not in NOT_IN_IDENTITY}
    return json.loads(json.dumps(settings | {"adapters": [x.settings() for x in recipes]}))


def check(
    lm: TargetModel, recipes: Sequence[AdapterRecipe], config: TrainerConfig, output: Path
) -> None:
    """Refuse, for a target without weights, what no data makes possible. Errors: those of `Trainer`
    and of `adapter_files.load_as_saved`."""
    exits = recipe.named_exits(recipes, lm).values()
    for adapter, exit_layer in exits:
        if adapter.start not in (None, recipe.RANDOM):
            adapter_files.load_as_saved(adapter.start, lm)
            recipe.check_start(adapter.start, exit_layer, adapter.architecture)
    if saved := load_checkpoint(output):
        known = identity(config, [adapter for adapter, _ in exits]).items()
        given = {k: v for k, v in known if v is not None or k not in FROM_RUN}
        check_same(output, saved["identity"], saved["identity"] | given, "output=")


def uses_stored_logits(
    lm: TargetModel, samples: Sequence[Sample], config: TrainerConfig, data: dict[str, Any]
) -> bool:
    """Whether to learn from stored distributions. Errors: `ConfigError` if it is not possible."""
    if config.use_stored_logits is False:
        return False
    model = (data.get("teacher") or {"model": lm.name})["model"]
    if all("teacher" in sample for sample in samples) and model == lm.name:
        log.info("learning from kept distributions: only the layers that adapters read are run")
        return True
    if config.use_stored_logits:
        raise ConfigError(
            f"trainer.use_stored_logits=true: this dataset has no kept distributions of '{lm.name}'"
            f"{'' if model == lm.name else f' but of {model!r}'}. Let it write its own with "
            "data.teacher=32 (and another data.path=), or leave trainer.use_stored_logits out."
        )
    return False


def resolve_sizes(
    config: TrainerConfig, lm: TargetModel, saved: dict[str, Any], ranks: Ranks
) -> tuple[int, int]:
    """The options `accumulate` and `loss_chunk`. If not given, they are those of the checkpoint's
    `saved` settings, else one micro-batch for each process, and what suits rank 0's device."""
    # a sharded target moves there later
    device = default_device() if config.shard_target else lm.device
    chunk = ranks.broadcast(recipe.default_loss_chunk(memory.total(device), lm.config.vocab_size))
    accumulate = config.accumulate or saved.get("accumulate", ranks.world)
    return accumulate, config.loss_chunk or saved.get("loss_chunk", chunk)


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The last checkpoint of a run; empty if there is none. Errors: `CorruptFile`."""
    path = folder / CHECKPOINT
    with explained(CorruptFile, f"checkpoint '{path}' cannot be read", "Delete it to train anew."):
        return torch.load(path, weights_only=True) if path.exists() else {}
