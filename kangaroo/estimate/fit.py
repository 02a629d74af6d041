"""Whether a training fits the devices found: said, and refused, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from kangaroo.data import store
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.mix import MixConfig
from kangaroo.data.synthesis import SynthesisConfig
from kangaroo.data.writing import TRIAL_LENGTH
from kangaroo.estimate.devices import PEAK, Devices, found, matmul_speed
from kangaroo.estimate.estimate_report import EstimateConfig
from kangaroo.estimate.expectation import Expectation, Text, expect
from kangaroo.models.loading import ModelConfig
from kangaroo.models.target import LM
from kangaroo.training.batches import check_holdout
from kangaroo.training.config import TrainerConfig
from kangaroo.training.recipe import AdapterRecipe
from kangaroo.utils.errors import ConfigError

Data: TypeAlias = SynthesisConfig | ConversationsConfig | MixConfig

PREFILL = 1024  # tokens of a prompt that the engine reads at a time
TEMPLATE = 32  # tokens that a chat template puts around a turn: an assumption
REMEMBERED = "remembered states"


@dataclass(frozen=True)
class Writing:
    """The memory that a process takes while the target writes the data, in bytes.

    Args:
        target: its weights, whole.
        reading: of one chunk of a prompt.
        row: keys and values of one text of `longest` tokens.
        rows: texts at a time; 0 where nothing is to be written.
    """

    target: int
    reading: int
    row: int
    rows: int
    longest: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.target + (self.reading + self.rows * self.row if self.rows else 0)

    @staticmethod
    def of(lm: LM, data: Data) -> Writing:
        """What writing this data with this target takes, by their shapes and settings."""
        size, shape = lm.dtype.itemsize, lm.config
        token = 3 * (shape.hidden_size + shape.intermediate_size) * size  # a layer's, in a pass
        target = sum(p.numel() for p in lm.parameters()) * size
        rows, longest = _to_write(data)
        longest = min(longest, lm.context)
        kept = lm.cache_like(1, 1, [lm.device] * lm.n_layers).bytes()
        # before it writes, the target is timed on plain passes over as many short texts
        row = max(longest * kept, min(longest, TRIAL_LENGTH) * token)
        return Writing(target, PREFILL * token, row, rows, longest)


def foresee(
    lm: LM,
    recipes: Sequence[AdapterRecipe],
    model: ModelConfig,
    data: Data,
    trainer: TrainerConfig,
    processes: int,
    holds_out: bool = True,
) -> tuple[Devices, Expectation, list[str]]:
    """The devices that a run trains on, what it will take there, and both as lines for the log.

    Args:
        lm: shapes alone, such as a blueprint's.
        holds_out: false where the run only writes the data.

    Errors: `ConfigError` where it cannot fit, or would hold out all that there is. Remembered
    states do not count yet: until the data are there, how much text they are is not known for sure.
    """
    # a sharded target is read, and writes, on the CPU, and then goes to the GPUs part by part
    reads = replace(model, device="cpu", device_map=None) if trainer.shard_target else model
    trains = replace(model, device_map=None) if trainer.shard_target else model
    writing, devices = Writing.of(lm, data), found(trains)
    check_writing(writing, found(reads))
    text, source = _text(data, trainer)
    if holds_out and not store.is_complete(Path(data.path)):  # that may be another one, and go
        check_holdout(trainer.holdout, text.conversations)
    trainer = trainer.on(devices.total, lm.config.vocab_size)
    expected = expect(lm, recipes, trainer, text, processes)
    check_training(
        {name: size for name, size in expected.memory.items() if name != REMEMBERED}, devices
    )
    lines = [
        f"on {processes} x {devices.name}, {devices.free / 1e9:.1f} GB free for each",
        f"{expected.summary()}, for {text.conversations} conversations, {text.tokens} tokens "
        f"({source})",
        _time(expected, devices, lm, processes, trainer.epochs),
    ]
    if writing.rows:
        lines.append(
            f"expect {writing.bytes / 1e9:.1f} GB of memory while the target writes the data, "
            f"{writing.rows} texts at a time (data.batch_size)"
        )
    return devices, expected, lines


def check_writing(writing: Writing, devices: Devices) -> None:
    """Raise `ConfigError` where a process has no room for the target, or not for its texts."""
    room = devices.free - writing.target
    if room < 0:
        raise ConfigError(
            f"the target alone takes {writing.target / 1e9:.1f} GB, and {_room(devices)}. Choose a "
            "smaller model, start fewer processes where they share that memory, or pass "
            "model.device_map=auto where one process has several GPUs."
        )
    if writing.bytes > devices.free:
        fitting = (room - writing.reading) // writing.row
        fix = "Not even one fits: ask for shorter ones"
        if fitting > 0:
            fix = f"Pass data.batch_size={fitting}"
        raise ConfigError(
            f"while the target writes the data, {writing.rows} texts of up to {writing.longest} "
            f"tokens take {writing.rows * writing.row / 1e9:.1f} GB of keys and values beside its "
            f"own {writing.target / 1e9:.1f} GB, and {_room(devices)}. {fix}, or train on text "
            "that is there (data=conversations data.regenerate=false)."
        )


def check_training(memory: dict[str, int], devices: Devices) -> None:
    """Raise `ConfigError` where a process has no room for these parts."""
    needed = sum(memory.values())
    if needed <= devices.free:
        return
    parts = sorted(memory.items(), key=lambda part: -part[1])[:3]
    fix = {
        "target": "Spread the target: trainer.shard_target=true in several processes, or "
        "model.device_map=auto on several GPUs; or choose a smaller one",
        REMEMBERED: "Pass trainer.cache_target_states=false, or ask for less data",
        "logits": "Pass a smaller trainer.loss_chunk=, or trainer.vocabulary=",
        "activations": "Pass a smaller trainer.batch_tokens= or trainer.max_length=",
        "frozen forward": "Pass a smaller trainer.batch_tokens= or trainer.max_length=",
    }.get(parts[0][0], "Train fewer adapters at a time")
    listed = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts)
    raise ConfigError(
        f"training takes {needed / 1e9:.1f} GB in each process ({listed}, ...), and "
        f"{_room(devices)}. {fix}."
    )


def _room(devices: Devices) -> str:
    return f"{devices.name} has {devices.free / 1e9:.1f} GB free for each"


def _time(expected: Expectation, devices: Devices, lm: LM, processes: int, epochs: int) -> str:
    by_sheet = None if devices.kind is None else PEAK.get(devices.kind)
    peak = by_sheet or matmul_speed(lm.dtype, devices.place)
    utilisation = EstimateConfig.utilisation
    hours = expected.hours(utilisation * peak) / processes
    return (
        f"expect about {hours:.2g} hours of training, {hours / epochs:.2g} an epoch, at "
        f"{utilisation:.0%} (assumed) of {peak / 1e12:.3g} TFLOP/s "
        f"({'by its data sheet' if by_sheet else 'measured'})"
    )


def _to_write(data: Data) -> tuple[int, int]:
    """How many texts the target writes at a time, and the tokens of the longest that it may write;
    0 and 0 where it writes none, or a dataset is in the folder already.
    """
    if isinstance(data, MixConfig) or store.is_complete(Path(data.path)):
        return 0, 0
    rows = min(data.batch_size, data.shard_size)
    if isinstance(data, ConversationsConfig):
        return (rows, data.max_length) if data.regenerate else (0, 0)
    turn = data.max_question_tokens + data.max_answer_tokens + 2 * TEMPLATE
    return rows, max(data.turns) * turn


def _text(data: Data, trainer: TrainerConfig) -> tuple[Text, str]:
    """How much text there is or will be, and how that is known.

    Errors: `DataError` where a part of a mix is missing, or a local source cannot be read.
    """
    there = store.is_complete(Path(data.path))
    if isinstance(data, MixConfig):
        folders = [data.path] if there else data.paths
        longest = trainer.max_length
    else:
        if not there:
            return EstimateConfig().text(data, trainer)
        longest = EstimateConfig(conversations=1).text(data, trainer)[0].longest
        folders = [data.path]
    parts = [store.about(Path(folder)) for folder in folders]
    kept = [(part.get("teacher") or {}).get("likeliest", 0) for part in parts]
    conversations, tokens, learnt = (
        sum(part[name] for part in parts)
        for name in ("conversations", "tokens", "assistant_tokens")
    )
    text = Text(conversations, tokens, learnt, longest, teacher=min(kept))
    return text, f"as they lie in {', '.join(folders)}"
