"""What training costs beside the frozen forward alone, part by part, in one run.

All parts see the same micro-batches and take turns on them, round after round, so that a machine
that slows down slows all of them.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kangaroo.data import store
from kangaroo.engine.clock import now
from kangaroo.evaluation.speed.cost_parts import (
    FROZEN,
    CostConfig,
    Work,
    micro_batches,
    parts,
    worker,
)
from kangaroo.evaluation.speed.peak import memory_of_part
from kangaroo.models.loading import ModelConfig
from kangaroo.models.target import LM
from kangaroo.training.config import TrainerConfig
from kangaroo.utils.memory import total
from kangaroo.utils.provenance import provenance


def measure(
    lm: LM, model: ModelConfig, config: CostConfig, trainer: TrainerConfig
) -> dict[str, Any]:
    """Run all parts; `cost_report.write` saves and shows what it returns.

    Times are in seconds a micro-batch, sizes in bytes. A part's `ratio` is its time against the
    frozen forward of the same round: the median of rounds, with the least and the greatest.
    """
    trainer = trainer.on(total(lm.device), lm.config.vocab_size)
    batches, few_K = micro_batches(lm, config, trainer)
    every = parts(config)
    times: dict[str, list[float]] = {part.name: [] for part in every}
    bar = tqdm(total=config.rounds * len(every), unit="part", desc="measuring")
    for _ in range(config.rounds):
        for part in every:
            # made anew: the adapters of all parts and their moments would fill a GPU
            work = worker(lm, part, batches, few_K, trainer)
            work(0)  # an optimizer makes its moments in its first step
            times[part.name].append(_timed(lm, work, len(batches)))
            bar.update()
    bar.close()
    tokens = sum(batch.input_BT.numel() for batch in batches)
    results: dict[str, Any] = {}
    for part in every:
        own = times[part.name]
        ratios = [a / b for a, b in zip(own, times[FROZEN], strict=True)]
        results[part.name] = {
            "seconds": statistics.median(own) / len(batches),
            "seconds_range": [min(own) / len(batches), max(own) / len(batches)],
            "tokens_per_second": tokens / statistics.median(own),
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "peak_memory": memory_of_part(lm, model, part, config, trainer)
            if config.memory
            else None,
        }
    return {
        "model": lm.name,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": lm.device.type,
        "threads": torch.get_num_threads(),
        "text": "random tokens" if config.data is None else config.data,
        "settings": asdict(config),
        "batch_tokens": tokens / len(batches),
        "learnt_tokens": sum(int(batch.wanted_BT.sum()) for batch in batches) / len(batches),
        "parts": results,
        "further_exit": further_exit(results, len(config.exit_layers)),
        "disk": on_disk(lm, config),
        "provenance": provenance(),
    }


def _timed(lm: LM, work: Work, count: int) -> float:
    """Seconds for all micro-batches; a GPU is waited for."""
    start = now(lm.device)
    for index in range(count):
        work(index)
    return now(lm.device) - start


def further_exit(results: dict[str, Any], exits: int) -> float | None:
    """What each exit after the first adds, in frozen forwards; None where there is one exit."""
    if exits < 2:
        return None
    return (results[f"attention, {exits} exits"]["ratio"] - results["attention"]["ratio"]) / (
        exits - 1
    )


def on_disk(lm: LM, config: CostConfig) -> dict[str, float | None]:
    """Bytes a token of training text, and what the states of the first exit would take instead."""
    dataset = None
    if config.data is not None:
        folder = Path(config.data)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        dataset = size / store.about(folder)["tokens"]
    # that of the exit and the final one, which other code dumps
    states = 2 * lm.config.hidden_size * lm.dtype.itemsize
    return {"dataset": dataset, "hidden states": 0, "hidden states, were they dumped": states}
