"""Every way to attend gives what plain attention gives.

Shapes: R rows, K key/value heads, G query heads of each, T tokens, E keys, C head size.
"""

import pytest
import torch
from helpers import adapter_for, random_prompts, tiny, vanilla_texts
from torch.nn.attention.bias import causal_lower_right

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.models import target as model
from kangaroo.models.attention import attention


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("width, extent", [(1, 9), (4, 9), (9, 9)])
def test_the_end_of_a_prompt_needs_no_mask(group, width, extent):
    q = torch.randn(1, 2 * group, width, 8)
    k, v = torch.randn(2, 1, 2, extent, 8).unbind()
    seen = torch.ones(width, extent, dtype=torch.bool).tril(extent - width)
    expected, _ = attention(torch.nn.Module(), q, k, v, seen[None, None], 0.3)
    found, _ = attention(torch.nn.Module(), q, k, v, causal_lower_right(width, extent), 0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_texts_are_the_same_by_the_gpus_paths(monkeypatch):
    """Prompts without masks, on the CPU."""
    prompts = random_prompts(5, 40, 130)
    expected = vanilla_texts(tiny(), prompts, 16)
    monkeypatch.setattr(model, "has_flash", lambda device, dtype: True)
    lm = tiny()
    adapter = adapter_for(lm)
    for drafter in (Vanilla(), Kangaroo(lm, adapter, 4, 0.3), KangarooTree(lm, adapter, 3, 0.0)):
        for rows in (1, 2):
            done = Engine(lm, drafter, prefill_chunk=16).generate(prompts, 16, batch_size=rows)
            assert [p + g.tokens for p, g in zip(prompts, done, strict=True)] == expected
