"""An estimate for a command line: how much text its data is, on which devices, and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Group
from rich.table import Table

from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.synthesis import SynthesisConfig
from kangaroo.errors import ConfigError
from kangaroo.estimate.devices import PEAK, Device, matmul_speed
from kangaroo.estimate.expectation import Expectation, Text
from kangaroo.training.config import TrainerConfig


@dataclass
class EstimateConfig:
    """What a plan assumes.

    Args:
        name: of the plan in tables.
        device: each process has one.
        flops: FLOP/s of a device; None is that of its kind.
        utilisation: the share of it that training reaches: an assumption.
        processes: None takes as many as `trainer.accumulate` keeps busy; without that, one.
        conversations, length: of data=conversations, whose source is not opened, and the mean of
            its tokens a conversation. The released code trains on 68000 of ShareGPT; the length is
            an assumption. data=self_synthesis is taken to write all that it may.
        assistant_share: of the tokens: an assumption.
        page: a Markdown page, in whose table the row of this name is written anew.
    """

    name: str = "run"
    device: Device = Device.a100
    flops: float | None = None
    utilisation: float = 0.4
    processes: int | None = None
    conversations: int = 68_000
    length: int = 1024
    assistant_share: float = 0.75
    page: str | None = None

    def devices(self, trainer: TrainerConfig) -> int:
        return self.processes or trainer.accumulate or 1

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """That training reaches on one device."""
        measured = self.flops is None and self.device is Device.cpu
        peak = matmul_speed(dtype) if measured else self.flops or PEAK[self.device]
        return self.utilisation * peak

    def text(self, data: SynthesisConfig | ConversationsConfig, trainer: TrainerConfig) -> Text:
        """How much text `data` will be, by its settings alone."""
        if isinstance(data, ConversationsConfig):
            count = min(self.conversations, data.limit or self.conversations)
            longest = min(data.max_length, trainer.max_length)
            tokens, sharded = count * min(self.length, longest), data.regenerate
        else:
            turn = data.max_question_tokens + data.max_answer_tokens
            sizes = [min(turn * turns, trainer.max_length) for turns in data.turns]
            count, longest, sharded = data.shards * data.shard_size, max(sizes), True
            tokens = sum(data.shard_size * sizes[i % len(sizes)] for i in range(data.shards))
        return Text(count, tokens, int(self.assistant_share * tokens), longest, sharded=sharded)


def row(
    expected: Expectation, config: EstimateConfig, trainer: TrainerConfig, target: str,
    dtype: torch.dtype,
) -> str:  # fmt: skip
    """A row of Markdown; `HEADS` names its columns."""
    count = config.devices(trainer)
    device_hours = expected.hours(config.flops_per_second(dtype))
    cells = [
        config.name,
        f"{target}, {expected.target / 1e9:.2f} B",
        f"{len(expected.trained)}, {sum(expected.trained.values()) / 1e6:.1f} M",
        f"{expected.steps}",
        f"{count} {config.device.name}",
        f"{sum(expected.memory.values()) / 1e9:.1f} ({expected.memory['target'] / 1e9:.1f})",
        f"{sum(expected.disk.values()) / 1e9:.2f}",
        f"{sum(expected.flops.values()):.1e}",
        f"{expected.flops['frozen forward'] / sum(expected.flops.values()):.0%}",
        f"{device_hours / count:.2g}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADS = [
    "training", "target", "adapters, trained parameters", "steps", "devices",
    "GB of memory each (target)", "GB of disk", "FLOPs", "frozen forward's share", "hours",
]  # fmt: skip


def write_row(page: Path, line: str) -> None:
    """Put a row in place of the one that begins with the same cell.

    Errors: `ConfigError` where the page has none.
    """
    start = line[: line.index("|", 1) + 1]
    lines = page.read_text(encoding="utf-8").splitlines()
    if not any(old.startswith(start) for old in lines):
        raise ConfigError(f"{page} has no row that begins with '{start}'; add one first.")
    new = [line if old.startswith(start) else old for old in lines]
    page.write_text("\n".join(new) + "\n", encoding="utf-8")


def terminal(expected: Expectation, config: EstimateConfig, trainer: TrainerConfig, text: Text,
             dtype: torch.dtype) -> Group:  # fmt: skip
    """Every part of an expectation, and what it assumes."""
    count, speed = config.devices(trainer), config.flops_per_second(dtype)
    parts = Table("part", "", box=box.SIMPLE_HEAD)
    parts.columns[1].justify = "right"
    last = [*expected.trained][-1]
    parts.add_row("target", f"{expected.target:,} parameters")
    for name, parameters in expected.trained.items():
        parts.add_row(name, f"{parameters:,} parameters", end_section=name == last)
    for title, sizes in (("memory", expected.memory), ("disk", expected.disk)):
        for name, size in sizes.items():
            parts.add_row(f"{title}: {name}", f"{size / 1e9:.3f} GB")
        parts.add_row(title, f"{sum(sizes.values()) / 1e9:.3f} GB", style="bold", end_section=True)
    total = sum(expected.flops.values())
    for name, flops in expected.flops.items():
        parts.add_row(f"arithmetic: {name}", f"{flops:.2e} FLOPs, {flops / total:.0%}")
    hours = expected.hours(speed) / count
    notes = (
        f"{count} x {config.device.name} at {speed / 1e12:.2f} TFLOP/s ({config.utilisation:.0%} "
        f"of its peak, assumed): {hours:.2g} hours for {expected.steps} steps over {text.tokens:,} "
        f"tokens x {trainer.epochs} epochs, {total:.1e} FLOPs in all. Memory is that of one "
        "process. Not in it: writing or tokenising the data, evaluations, communication, the "
        "allocator's waste."
    )
    return Group(parts, notes)
