"""Peak memory of decoding beside what target, adapter and cache add up to."""

from __future__ import annotations

from dataclasses import replace

from kangaroo import memory, models
from kangaroo.drafters.base import Drafter
from kangaroo.drafters.kangaroo import Kangaroo, KangarooConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import Engine
from kangaroo.model import LM
from kangaroo.models import ModelConfig


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
    drafter = config.build(lm)
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
    if head.vocabulary_K is None or drafter.adapter.head is not None:
        return 0
    return head.weight_KD.numel() * head.weight_KD.element_size()
