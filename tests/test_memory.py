"""Peak memory is measured in a process of its own."""

import pytest

from kangaroo.benchmark.memory import measure_memory
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.models import ModelConfig


@pytest.mark.slow
def test_what_decoding_takes_is_target_adapter_and_cache():
    model = ModelConfig("shape", "random:embedded:smollm2-135m", device="cpu")
    found = measure_memory(model, KangarooConfig(adapter="untrained:3"), list(range(200)), 16)
    assert found["target"] == 2 * 134_515_008
    assert found["draft_head"] == 0
    # 31 layers, 3 heads of 64, keys and values, 216 tokens and what a draft needs beside them
    assert found["cache"] == 31 * 2 * 3 * 64 * 2 * (216 + 14)
    assert sum(found[p] for p in ("target", "adapter", "draft_head", "cache")) == found["computed"]
    assert 1 < found["measured"] / found["computed"] < 1.5
