"""Peak memory: of this process, and of one that began with nothing."""

import pytest
import torch

from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.evaluation.speed.peak import measure_memory
from kangaroo.models.loading import ModelConfig
from kangaroo.utils import memory

CPU = torch.device("cpu")
SIZE = 64 * 2**20


def test_the_peak_stays_when_memory_is_given_back_and_can_begin_anew():
    held = memory.resident()
    torch.ones(SIZE, dtype=torch.uint8).sum()
    assert memory.peak(CPU) >= held + SIZE
    if memory.begin_peak(CPU):  # where the system can
        assert memory.peak(CPU) < held + SIZE


def test_a_fresh_process_computes_with_as_many_threads():
    assert memory.in_fresh_process(torch.get_num_threads) == torch.get_num_threads()


def test_weights_are_counted_in_bytes():
    layer = torch.nn.Linear(3, 5)
    assert memory.weights(layer, layer.half()) == 2 * 2 * (3 * 5 + 5)  # `half` changes it in place


@pytest.mark.slow
def test_what_decoding_takes_is_target_adapter_and_cache():
    model = ModelConfig("shape", "random:embedded:smollm2-135m", device="cpu")
    sizes = measure_memory(model, KangarooConfig(adapter="untrained:3"), list(range(200)), 16)
    assert sizes["target"] == 2 * 134_515_008
    assert sizes["draft_head"] == 0
    # 31 layers, 3 heads of 64, keys and values, 216 tokens and what a draft needs beside them
    assert sizes["cache"] == 31 * 2 * 3 * 64 * 2 * (216 + 14)
    assert sum(sizes[p] for p in ("target", "adapter", "draft_head", "cache")) == sizes["computed"]
    assert 1 < sizes["measured"] / sizes["computed"] < 1.5
