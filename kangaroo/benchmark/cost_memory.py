"""Peak memory of one part of training: the allocator's on a GPU, a fresh process's on a CPU."""

from __future__ import annotations

from kangaroo import memory, models
from kangaroo.benchmark.cost_parts import CostConfig, Part, micro_batches, worker
from kangaroo.model import LM
from kangaroo.models import ModelConfig
from kangaroo.training.config import TrainerConfig


def peak_memory(
    lm: LM, model: ModelConfig, part: Part, config: CostConfig, trainer: TrainerConfig
) -> int | None:
    """Bytes at the largest moment of the part's work, the target's weights included.

    On a CPU what counts is the resident memory of a process of its own, beyond what it held before
    it loaded the target: what an earlier part gave back may still be resident. None where the
    system does not tell.
    """
    if lm.device.type == "cuda":
        return _peak_of_work(lm, part, config, trainer)
    return memory.in_fresh_process(_beyond_libraries, model, part, config, trainer)


def _beyond_libraries(
    model: ModelConfig, part: Part, config: CostConfig, trainer: TrainerConfig
) -> int | None:
    before = memory.resident()
    peak = _peak_of_work(LM(models.load(model)[0]), part, config, trainer)
    return None if peak is None else peak - before


def _peak_of_work(lm: LM, part: Part, config: CostConfig, trainer: TrainerConfig) -> int | None:
    batches, few_K = micro_batches(lm, config, trainer)
    if not memory.begin_peak(lm.device):  # loading may have taken more
        return None
    work = worker(lm, part, batches, few_K, trainer)
    for index in range(len(batches)):
        work(index)
    return memory.peak(lm.device)
