"""What a drafter adds to the target in memory."""

import mmap
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from helpers import adapter_for, random_prompts, tiny
from torch import nn

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.utils.memory import Footprint, footprint


def size(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def footprint_of(lm, drafter):
    """Its footprint once it has written something."""
    engine = Engine(lm, drafter)
    engine.generate(random_prompts(5), 8)
    return footprint(drafter, [lm, engine.batch])


def test_kangaroos_adapter_cache_and_states_count_and_the_shared_head_does_not():
    lm = tiny()
    assert footprint_of(lm, Vanilla()) == Footprint(0, 0)
    adapter = adapter_for(lm)
    drafter = Kangaroo(lm, adapter, threshold=0.0)
    parameters = sum(p.numel() for p in adapter.parameters())
    weights = size(*adapter.parameters(), *adapter.buffers())
    assert footprint(drafter, [lm]) == Footprint(parameters, weights)
    after = footprint_of(lm, drafter)
    states = drafter.shallow_BWD.untyped_storage().nbytes() + size(drafter.deep_BSD)
    assert after == Footprint(parameters, weights + drafter.cache.bytes() + states)


def test_every_container_is_searched_and_every_piece_of_memory_counts_once(tmp_path):
    @dataclass
    class Store:
        entries: dict[str, object] = field(default_factory=dict)

    mapped = np.memmap(tmp_path / "store", np.int32, "w+", shape=(6,))
    assert isinstance(mapped.base, mmap.mmap)
    weight, table = nn.Linear(3, 2, bias=False), torch.zeros(10)
    views = [table[:3], (table[5:],)]
    store = Store({"mapped": mapped[2:], "views": views, "again": weight.weight})
    drafter = SimpleNamespace(store=store, layers=nn.ModuleList([weight]), array=np.zeros(4))
    drafter.itself = drafter
    assert footprint(drafter, []) == Footprint(6, 6 * 4 + 10 * 4 + 6 * 4 + 4 * 8)
    assert footprint(drafter, [{"theirs": table[1:2]}, weight]).bytes == 6 * 4 + 4 * 8
