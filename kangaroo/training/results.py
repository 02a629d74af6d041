"""Metrics of adapters in training, held-out by teacher forcing and by decoding; and a plot of them.

Shapes: B rows, T tokens, M learnt positions, S draft steps, W draft tokens, F results.
"""

import copy
import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from kangaroo.data.filters import answer_spans
from kangaroo.drafters.base import TrainedConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import compression_rate
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.metrics import ctar
from kangaroo.evaluation.plots import FAINT
from kangaroo.heads.adapter_files import saved_dtype
from kangaroo.heads.base import Trainable
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.training.distill import MEASURES, Student
from kangaroo.training.recipe import Trainee, TrainerConfig
from kangaroo.utils.discovery import classes
from kangaroo.utils.errors import ConfigError, DataError

STEPS = 6  # draft tokens of the held-out compression rate: the paper's gamma
DRAFTERS = classes("kangaroo.drafters", TrainedConfig)
ROWS = 8  # prompts decoded at a time, which limits the size of the cache
METRICS, CURVES = "metrics.jsonl", "curves.png"
HEADINGS = {
    "loss": "Loss a position",
    "agreement": "Top-1 agreement",
    "expected_acceptance": "Expected acceptance, sampled",
    "compression_rate": "Compression rate, 6 draft tokens",
    "learning_rate": "Learning rate",
}
MARKS = {"train": "-", "held_out": "o-", "decode": "D"}  # line styles


def mean_metrics(prefix: str, sums_SF: Tensor) -> dict[str, float]:
    """Means per position, without draft steps that no position reaches: `<prefix>/<measure>` for
    the first draft token, `<prefix>/step2/<measure>` for the second, ..."""
    metrics = {}
    for step, (*values, positions) in enumerate(sums_SF.tolist(), 1):
        name = prefix if step == 1 else f"{prefix}/step{step}"
        for measure, value in zip(MEASURES[:-1], values, strict=True):
            if positions:
                metrics[f"{name}/{measure}"] = value / positions
    return metrics


def held_out_metrics(prefix: str, sums_SF: Tensor, accepted_W: Tensor) -> dict[str, float]:
    """Means per position of all draft steps, CTAR and the compression rate."""
    shares = [count / float(sums_SF[0, -1]) for count in accepted_W.tolist()]
    rate = 1 + sum(shares)  # if no round is cut (the paper, section 4.1)
    return mean_metrics(prefix, sums_SF) | compression_metrics(prefix, shares, rate)


def count_accepted(steps: Sequence[Student], learnt_BT: Tensor, most: int = STEPS) -> Tensor:
    """`[W]`: the number of positions from which the first 1, 2, ... draft tokens, `most` at most,
    would all be accepted in greedy decoding, if the text is the target's own."""
    counts, accepted_BT = [], learnt_BT
    for step in range(STEPS):
        agrees_BT = torch.zeros_like(learnt_BT)
        if step < most:
            agrees_BT[learnt_BT] = steps[min(step, len(steps) - 1)].agrees_M
        accepted_BT = accepted_BT & F.pad(agrees_BT[:, step:], (0, step))
        counts.append(accepted_BT.sum())
    return torch.stack(counts)


def compression_metrics(prefix: str, shares: Sequence[float], rate: float) -> dict[str, float]:
    """CTAR(1), CTAR(2), ... and the compression rate, by name."""
    metrics = {f"{prefix}/ctar{w}": share for w, share in enumerate(shares, start=1)}
    return metrics | {f"{prefix}/compression_rate": rate}


def decode_prompts(
    samples: Sequence[Sample], config: TrainerConfig, context: int
) -> list[list[int]]:
    """Prompts for `decode`: the first samples that leave room for new tokens, up to their last
    answer. A sharded target decodes none. Errors: `ConfigError` if no sample is short enough."""
    if config.shard_target:  # it would gather its layers in all processes for every token
        return []
    longest = min(config.max_length, context - config.decode_tokens)
    starts = [answer_spans(sample["loss_mask"])[-1][0] for sample in samples]
    pairs = zip(samples, starts, strict=True)
    prompts = [sample["input_ids"][:start] for sample, start in pairs if 0 < start <= longest]
    if config.decode_prompts and not prompts:
        raise ConfigError(
            f"none of the {len(samples)} held-out samples has a prompt of 1 to {longest} tokens to "
            f"decode {config.decode_tokens} more from. Lower trainer.decode_tokens, or pass "
            "trainer.decode_prompts=0."
        )
    return prompts[: config.decode_prompts]


def decode(
    lm: TargetModel, trainees: Sequence[Trainee], prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, float]:
    """Decode greedily with every adapter, as it would be saved now, and `STEPS` draft tokens at
    threshold 0. Returns `decode/<name>/...` metrics as in `kangaroo.evaluation.metrics`."""
    metrics: dict[str, float] = {}
    for trainee in trainees:
        method = DRAFTERS[trainee.recipe.architecture.drafter]
        drafter = method.chain(STEPS).build_from(lm, *frozen_copy(lm, trainee))
        engine = Engine(lm, drafter, always_drafts=True)
        generations = engine.generate(prompts, new_tokens, Sampling(), batch_size=ROWS)
        steps = [step for generation in generations for step in generation.steps]
        shares = ctar([step.accepted for step in steps], STEPS)
        rate = compression_rate(steps)
        metrics |= compression_metrics(f"decode/{trainee.name}", shares, rate)
    return metrics


def frozen_copy(lm: TargetModel, trainee: Trainee) -> tuple[Trainable, list[DraftHead]]:
    """A copy of the adapter as if it were saved and loaded now, and its draft heads."""
    dtype = saved_dtype(trainee.adapter, lm)
    adapter = copy.deepcopy(trainee.adapter).to(dtype).to(lm.dtype).eval().requires_grad_(False)
    return adapter, adapter.draft_heads(lm, trainee.vocabulary_K)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of every step, without a last line that is still being written."""
    path = folder / METRICS
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def write_curves(folder: Path) -> None:
    """Plot every adapter's metrics over steps to `curves.png`. Errors: `DataError` for none."""
    rows = read_metrics(folder)
    if not rows:
        raise DataError(f"'{folder}' has no {METRICS} of a training; an evaluation needs page=.")
    adapters = dict.fromkeys(k.split("/")[1] for row in rows for k in row if k.startswith("train/"))
    colors = dict(zip(adapters, cycle(matplotlib.color_sequences["tab20"]), strict=False))
    figure = Figure(figsize=(11.5, 6.6), layout="constrained")
    figure.suptitle(f"Training of {folder.name}", fontsize=12, x=0.01, ha="left")
    *panels, legend = figure.subplots(2, 3).flat
    legend.axis("off")
    for axes, (metric, heading) in zip(panels, HEADINGS.items(), strict=True):
        axes.set_title(heading, fontsize=10, loc="left")
        axes.set_xlabel("optimizer step", fontsize=8)
        axes.grid(color=FAINT, linewidth=0.8)
        for adapter, color in colors.items():
            for result, mark in MARKS.items():
                name = f"{result}/{adapter}/{metric}"
                values = {row["step"]: row[name] for row in rows if name in row}
                axes.plot(list(values), list(values.values()), mark, color=color, lw=1, ms=4)
    for adapter, color in colors.items():
        legend.plot([], [], color=color, label=adapter)
    legend.legend(loc="upper left", frameon=False, fontsize=8)
    figure.savefig(folder / CURVES, dpi=150)
