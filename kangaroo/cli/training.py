"""Commands about training: say what it takes, write its data, run it."""

import logging
from dataclasses import asdict, replace
from pathlib import Path

import torch

from kangaroo.api import load_target
from kangaroo.cli.command import command, in_group, plain
from kangaroo.cli.schema import TrainCommand
from kangaroo.cpu.native import torch_multiplies
from kangaroo.data import store
from kangaroo.heads import adapter_files
from kangaroo.models.loading import ModelConfig, meta_model, options_of
from kangaroo.models.target import TargetModel
from kangaroo.training import backend
from kangaroo.training.estimate import Devices, foresee
from kangaroo.training.loop import Trainer
from kangaroo.training.results import CURVES
from kangaroo.utils.folders import command_line
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranks import Ranks, join
from kangaroo.utils.tracking import NoTracker

log = logging.getLogger(__name__)

SLOW_BFLOAT16 = (
    "PyTorch multiplies bfloat16 slowly on this processor, which has no AVX-512: training takes "
    "some five times as long as with model.dtype=float32, and ten times with trainer.muon=true, "
    "whatever the format. The text can be written in bfloat16 "
    f"first ({command_line('make_data')}), and the adapter serves either format."
)


@command(shared=True, goes_on=True)
def train(config: TrainCommand) -> float | None:
    """Say what a training takes; let the target write its data, train adapters on it, and save
    them. Returns the best held-out compression rate."""
    in_group(config.logger, config.model.name)
    with join() as ranks:
        backend.check(config.trainer, ranks)
        check_format(config.model, config.trainer.muon)
        say_what_it_takes(config, ranks)
        if config.estimate:
            return None
        lm = _target_with_data(config, ranks)
        output, recipes = Path(config.output), [config.adapter, *config.more.values()]
        samples, about = store.load(Path(config.data.path))
        logger = config.logger if ranks.is_first else NoTracker()
        origin = {"dataset": about, "provenance": provenance()}
        # before a tracker has begun a run: this may refuse
        trainer = Trainer(lm, samples, recipes, config.trainer, output, about, ranks)
        with logger.start(plain(config) | origin, output) as tracker:
            folders = trainer.train(tracker)
            if not ranks.is_first:
                return None
            numbers = [_report(folder, config.model, tracker) for folder in folders]
            best = max(numbers, key=lambda each: each["compression_rate"])
            tracker.result(best, [folders[0].parent / CURVES])
            return best["compression_rate"]


@command(shared=True)
def make_data(config: TrainCommand) -> None:
    """The first part of training alone: let the target write its data."""
    with join() as ranks:
        say_what_it_takes(config, ranks, holds_out=False)
        if not config.estimate:
            _target_with_data(config, ranks)


def check_format(model: ModelConfig, muon: bool = False) -> None:
    """Warn where training would be slow in the model's number format, or Muon in its own."""
    multiplied = torch.bfloat16 if muon else model.dtype.torch
    if Devices.of(model).place == "cpu" and not torch_multiplies(multiplied):
        log.warning("%s", SLOW_BFLOAT16)


def say_what_it_takes(config: TrainCommand, ranks: Ranks, holds_out: bool = True) -> None:
    """Log what the run takes on the devices that it finds; `holds_out` is false where it only
    writes the data. Errors: `ConfigError` where it cannot fit, or would hold out all there is."""
    lm, recipes = meta_model(config.model), [config.adapter, *config.more.values()]
    parts = config.model, config.data, config.trainer, ranks.world
    for line in foresee(lm, recipes, *parts, holds_out):
        log.info("%s", line)
    ranks.wait()  # who loads its target earlier takes memory that others count


def _target_with_data(config: TrainCommand, ranks: Ranks) -> TargetModel:
    """The target, once the data is there."""
    model = config.model
    if config.trainer.shard_target:  # it goes to the GPUs part by part, just before training
        model = replace(model, device="cpu", device_map=None)
    lm, tokenizer = load_target(model)
    config.data.make(lm, tokenizer, ranks)
    ranks.wait()
    about = store.about(Path(config.data.path))
    counts = (about[name] for name in ("conversations", "tokens", "assistant_tokens"))
    log.info("%d conversations, %d tokens, %d of the assistant, from %s", *counts, config.data.path)
    return lm


def _report(folder: Path, model: ModelConfig, tracker: NoTracker) -> dict[str, float]:
    """Hand a trained adapter to the tracker, and say how to measure it. Returns its numbers."""
    saved = adapter_files.read_config(str(folder))
    described = asdict(saved)
    # W&B takes a hundred keys; the file among the artifact's has the whole provenance
    progress = described.pop("training")["progress"]
    files, name = sorted(folder.iterdir()), f"{model.name}-{folder.name}"
    tracker.save(folder, files, name, "adapter", described | progress)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    target, drafter = options_of(model.path, model.name), saved.architecture.drafter
    use = command_line("evaluate", **target, drafter=drafter, drafter__adapter=shown)
    log.info("saved %s; measure it: %s", shown, use)
    decoded = {f"decoded/{name}": value for name, value in progress["decoded"].items()}
    facts = {"exit_layer": saved.exit_layer, "parameters": saved.parameters}
    return facts | progress["held_out"] | decoded
