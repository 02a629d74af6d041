"""Peak memory: of decoding, beside what its parts add up to, and of a part of training."""

from __future__ import annotations

from dataclasses import replace

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.kangaroo import Kangaroo, KangarooConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.speed.cost_parts import CostConfig, Part, micro_batches, worker
from kangaroo.models import loading as models
from kangaroo.models.loading import ModelConfig
from kangaroo.models.target import LM
from kangaroo.training.config import TrainerConfig
from kangaroo.utils import memory


def measure_memory(
    model: ModelConfig, drafter: KangarooConfig, prompt: list[int], new_tokens: int
) -> dict[str, int]:
    """Bytes computed and measured, by a process of its own that decodes one text and ends.

    On a GPU the measure is the most that was allocated. On a CPU it is how much the process's
    largest size grew from when it had decoded with a tiny model, so that libraries are not counted:
    loading, the tokenizer and a prompt's activations are.
    """
    return memory.in_fresh_process(_measure, model, drafter, prompt, new_tokens)


def _measure(
    model: ModelConfig, config: KangarooConfig, prompt: list[int], new_tokens: int
) -> dict[str, int]:
    tiny, _ = models.load(replace(model, name="tiny", path=models.TINY, chat_template=None))
    _decode(LM(tiny).compile_for_decoding(), Vanilla(), [1, 2, 3], 4)
    device = next(tiny.parameters()).device
    del tiny
    before = memory.peak(device)
    hf, _ = models.load(model)
    lm = LM(hf)
    if model.compiled:
        lm.compile_for_decoding()
    drafter = config.of(lm, *config.load(lm))
    cache = _decode(lm, drafter, prompt, new_tokens) + drafter.cache.bytes()
    after = memory.peak(device)
    parts = {
        "target": memory.weights(lm.hf),
        "adapter": memory.weights(drafter.adapter),
        "draft_head": _copied(drafter),
        "cache": cache,
    }
    return parts | {"computed": sum(parts.values()), "measured": after - before}


def _decode(lm: LM, drafter: Drafter, prompt: list[int], new_tokens: int) -> int:
    """Write one text; the size of the target's cache."""
    engine = Engine(lm, drafter)
    written = engine.stream(prompt, new_tokens)
    assert engine.batch is not None
    size = engine.batch.cache.bytes()
    for _ in written:
        pass
    return size


def _copied(drafter: Kangaroo) -> int:
    """A draft vocabulary's rows of the target's head are copied; other heads count elsewhere."""
    head = drafter.head
    if head.vocabulary_K is None or drafter.adapter.own_heads():
        return 0
    return head.weight_KD.numel() * head.weight_KD.element_size()


def memory_of_part(
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
