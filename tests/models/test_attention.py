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


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("width, extent", [(1, 9), (5, 9), (9, 9)])
def test_every_mask_and_none_give_the_formula_capped_or_not(width, extent, group, softcap):
    q, (k, v) = torch.randn(2, 2 * group, width, 8), torch.randn(2, 2, 2, extent, 8)
    seen = torch.ones(width, extent, dtype=torch.bool).tril(extent - width)
    scores = q @ k.repeat_interleave(group, 1).mT * 3
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)
    added = torch.zeros(width, extent).masked_fill(~seen, -torch.inf)[None, None]
    masks = [seen[None, None], added, causal_lower_right(width, extent)]
    for mask in [*masks, None] if width == extent else masks:
        out, _ = attention(torch.nn.Module(), q, k, v, mask, 3.0, softcap=softcap)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    read = torch.arange(width).expand(2, -1) % 3 != 1
    out, _ = attention(torch.nn.Module(), q, k, v, added, 3.0, read, softcap=softcap)
    torch.testing.assert_close(out[read], expected[read], rtol=0, atol=1e-5)
    assert not out[~read].any()


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
