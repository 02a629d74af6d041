"""Peak memory of one part of training: the allocator's on a GPU, a fresh process's on a CPU."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from kangaroo import models
from kangaroo.benchmark.cost_parts import CostConfig, Part, micro_batches, worker
from kangaroo.model import LM
from kangaroo.models import ModelConfig
from kangaroo.training.config import TrainerConfig

SELF = Path("/proc/self")  # Linux keeps a process's peak there


def peak_memory(
    lm: LM, model: ModelConfig, part: Part, config: CostConfig, trainer: TrainerConfig
) -> int | None:
    """Bytes at the largest moment of the part's work, the target's weights included.

    On a CPU what counts is the resident memory of a process of its own, beyond what it held before
    it loaded the target: what an earlier part gave back may still be resident. None where the
    system does not tell.
    """
    if lm.device.type == "cuda":
        return _on_gpu(lm, part, config, trainer)
    if not (SELF / "clear_refs").exists():
        return None
    spawned = multiprocessing.get_context("spawn")  # a fork would hold the parent's memory
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        threads = torch.get_num_threads()
        return pool.submit(_resident, model, part, config, trainer, threads).result()


def _on_gpu(lm: LM, part: Part, config: CostConfig, trainer: TrainerConfig) -> int:
    batches, few_K = micro_batches(lm, config, trainer)
    work = worker(lm, part, batches, few_K, trainer)
    torch.cuda.reset_peak_memory_stats(lm.device)
    for index in range(len(batches)):
        work(index)
    return torch.cuda.max_memory_allocated(lm.device)


def _resident(
    model: ModelConfig, part: Part, config: CostConfig, trainer: TrainerConfig, threads: int
) -> int:
    torch.set_num_threads(threads)
    before = _status("VmRSS")
    lm = LM(models.load(model)[0])
    batches, few_K = micro_batches(lm, config, trainer)
    (SELF / "clear_refs").write_text("5")  # the peak begins anew: loading may have been higher
    work = worker(lm, part, batches, few_K, trainer)
    for index in range(len(batches)):
        work(index)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = (SELF / "status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))
