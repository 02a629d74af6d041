"""The cache writes where it is told, and attention reads no more than it must.

Shapes as in `kangaroo/engine/cache.py`.
"""

import torch

from kangaroo.engine.cache import BUCKET, ForwardMeta, KVCache, occupied

CPU = torch.device("cpu")


def test_update_writes_the_block_and_nothing_else():
    cache = KVCache(3, 10, 2, 4, torch.float32, [CPU] * 2)
    for cached in (*cache.keys, *cache.values):
        cached.copy_(torch.randn(cached.shape))
    before = cache.keys[1].unflatten(0, (3, 10)).clone()
    other_layer = cache.keys[0].clone()
    k_RKTC, v_RKTC = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    slots_RT, none = torch.tensor([[4, 9, 0], [7, 2, 3]]), torch.zeros(1, 1)
    block = ForwardMeta(slots_RT, slots_RT, None, 8, slice(1, 3), (none, none))
    seen_k, seen_v = cache.at(block).update(k_RKTC, v_RKTC, 1)
    expected = before.clone()
    for i, row in enumerate((1, 2)):
        expected[row, slots_RT[i]] = k_RKTC[i].transpose(0, 1)
    assert torch.equal(cache.keys[1].unflatten(0, (3, 10)), expected)
    assert torch.equal(cache.keys[0], other_layer)
    assert torch.equal(seen_k, expected[1:3, :8].transpose(1, 2))
    assert torch.equal(seen_v[0, :, 4], v_RKTC[0, :, 0])


def test_the_extent_is_bucketed_and_never_beyond_the_allocation():
    assert occupied(1000, 1) == occupied(1000, BUCKET) == BUCKET
    assert occupied(1000, BUCKET + 1) == 2 * BUCKET
    assert occupied(100, BUCKET + 1) == 100
