"""An estimate for a command line: how much text its data is, on which devices, and as a table."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Group

from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.reading import Source, is_local, read, regular
from kangaroo.data.synthesis import SynthesisConfig
from kangaroo.estimate.devices import PEAK, Device, matmul_speed
from kangaroo.estimate.expectation import Expectation, Text
from kangaroo.training.config import TrainerConfig
from kangaroo.utils import tables
from kangaroo.utils.ranges import Count, Positive, Ranged, Share
from kangaroo.utils.tables import Row, number, share

ASSUMED = 68_000  # conversations


@dataclass
class EstimateConfig(Ranged):
    """What a plan assumes.

    Args:
        name: of the plan in tables.
        device: each process has one.
        flops: FLOP/s of a device; None is that of its kind.
        utilisation: the share of it that training reaches: an assumption.
        processes: None takes as many as `trainer.accumulate` keeps busy; without that, one.
        conversations: of data=conversations. None reads them where the source is a local file or
            folder, and counts their characters; of others it takes 68000, the number of ShareGPT's
            that the released code trains on. data=self_synthesis is taken to write all that it may.
        length: the mean of their tokens where they are not read: an assumption.
        assistant_share: of the tokens: an assumption.
        table: a Markdown file, to which this estimate is added as a row.
    """

    name: str = "run"
    device: Device = Device.a100
    flops: Positive | None = None
    utilisation: Share = 0.4
    processes: Count | None = None
    conversations: Count | None = None
    length: Count = 1024
    assistant_share: Share = 0.75
    table: str | None = None

    def devices(self, trainer: TrainerConfig) -> int:
        """How many there are, one a process."""
        return self.processes or trainer.accumulate or 1

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """That training reaches on one device."""
        measured = self.flops is None and self.device is Device.cpu
        peak = matmul_speed(dtype) if measured else self.flops or PEAK[self.device]
        return self.utilisation * peak

    def text(
        self, data: SynthesisConfig | ConversationsConfig, trainer: TrainerConfig
    ) -> tuple[Text, str]:
        """How much text `data` will be, and how that is known.

        Errors: `DataError` for a local source that cannot be read.
        """
        if isinstance(data, ConversationsConfig):
            longest = min(data.max_length, trainer.max_length)
            if self.conversations is None and (text := text_of_source(data, longest)) is not None:
                return text, f"by the characters in {data.source}"
            count = self.conversations or ASSUMED
            count, sharded = min(count, data.limit or count), data.regenerate
            tokens = count * min(self.length, longest)
        else:
            turn = data.max_question_tokens + data.max_answer_tokens
            sizes = [min(turn * turns, trainer.max_length) for turns in data.turns]
            count, longest, sharded = data.shards * data.shard_size, max(sizes), True
            tokens = sum(data.shard_size * sizes[i % len(sizes)] for i in range(data.shards))
        learnt, kept = int(self.assistant_share * tokens), data.teacher
        return Text(count, tokens, learnt, longest, sharded=sharded, teacher=kept), "assumed"


def text_of_source(data: ConversationsConfig, longest: int) -> Text | None:
    """How much text the conversations of a source will be, each cut at `longest` tokens, by their
    characters; answers that the target writes are taken to be as long as they may. None where the
    source is not on this machine, or has nothing to learn from, which is refused when it is used.

    Errors: those of `reading.read`.
    """
    if not is_local(data.source):
        return None
    source = Source(data.source, data.subset, data.split, data.revision, data.column)
    learnt_role = "user" if data.regenerate else "assistant"
    sizes, learnt = [], 0.0
    for messages in read(source, data.limit, Counter() if data.skip_bad else None):
        turns, _ = regular(messages)
        answers = [turn for turn in turns if turn["role"] == learnt_role]
        asked = sum(len(turn["content"]) for turn in turns if turn["role"] != "assistant")
        written = sum(len(turn["content"]) for turn in turns if turn["role"] == "assistant")
        said = written / Text.characters
        if data.regenerate:
            said = float(data.max_answer_tokens * len(answers))
        size = asked / Text.characters + said
        if answers:
            sizes.append(min(size, longest))
            learnt += said * sizes[-1] / size
    if not sizes:
        return None
    return Text(
        *(len(sizes), math.ceil(sum(sizes)), math.ceil(learnt), math.ceil(max(sizes))),
        sharded=data.regenerate,
        teacher=data.teacher,
    )


def row(
    expected: Expectation,
    config: EstimateConfig,
    trainer: TrainerConfig,
    target: str,
    dtype: torch.dtype,
) -> Row:
    """An expectation as one row, beside those of other trainings."""
    count, flops = config.devices(trainer), sum(expected.flops.values())
    hours = expected.hours(config.flops_per_second(dtype)) / count
    memory = sum(expected.memory.values())
    return {
        "training": config.name,
        "target": f"{target}, {expected.target / 1e9:.2f} B",
        "adapters, trained parameters": (
            f"{len(expected.trained)}, {sum(expected.trained.values()) / 1e6:.1f} M"
        ),
        "steps": str(expected.steps),
        "devices": f"{count} {config.device.name}",
        "GB of memory each (target)": (
            f"{memory / 1e9:.1f} ({expected.memory['target'] / 1e9:.1f})"
        ),
        "GB of disk": number(sum(expected.disk.values()) / 1e9),
        "FLOPs": f"{flops:.1e}",
        "frozen forward's share": share(expected.flops["frozen forward"] / flops),
        "hours": f"{hours:.2g}",
    }


def append(line: Row, file: Path) -> None:
    """Add a row to a Markdown table; a new file gets the headings first."""
    lines = tables.markdown([line]).splitlines()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as table:
        table.write("\n".join(lines[2 if table.tell() else 0 :]) + "\n")


def terminal(
    expected: Expectation,
    config: EstimateConfig,
    trainer: TrainerConfig,
    text: Text,
    dtype: torch.dtype,
) -> Group:
    """Every part of an expectation, and what it assumes."""
    count, speed = config.devices(trainer), config.flops_per_second(dtype)
    total = sum(expected.flops.values())
    parts = {"target": f"{expected.target:,} parameters"}
    parts |= {name: f"{size:,} parameters" for name, size in expected.trained.items()}
    for title, sizes in (("memory", expected.memory), ("disk", expected.disk)):
        parts |= {f"{title}: {name}": f"{size / 1e9:.3f} GB" for name, size in sizes.items()}
        parts[title] = f"{sum(sizes.values()) / 1e9:.3f} GB"
    for name, flops in expected.flops.items():
        parts[f"arithmetic: {name}"] = f"{flops:.2e} FLOPs, {flops / total:.0%}"
    rows = [{"part": name, "": takes} for name, takes in parts.items()]
    hours = expected.hours(speed) / count
    notes = (
        f"{count} x {config.device.name} at {speed / 1e12:.2f} TFLOP/s ({config.utilisation:.0%} "
        f"of its peak, assumed): {hours:.2g} hours for {expected.steps} steps over {text.tokens:,} "
        f"tokens x {trainer.epochs} epochs, {total:.1e} FLOPs in all. Memory is that of one "
        "process. Not in it: writing or tokenising the data, evaluations, communication, the "
        "allocator's waste."
    )
    return Group(tables.terminal(rows, bold=("memory", "disk")), notes)
