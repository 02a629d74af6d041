"""Every way to attend gives what plain attention gives.

Shapes: R rows, K key/value heads, G query heads of each, T tokens, E keys, C head size, P parts.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import adapter_for, random_prompts, tiny, vanilla_texts
from torch.nn.attention.bias import causal_lower_right

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.models import attention as module
from kangaroo.models import target as model
from kangaroo.models.attention import attention, can_split, in_parts, parts_of

CPU = torch.device("cpu")


def by_formula(q_PKTC, k_PKEC, v_PKEC, bias_P1TE, scaling):
    """Stands in for the GPU's kernel: a token that sees nothing of a part gets NaN, and the sums of
    such a token are rubbish."""
    scores_PKTE = q_PKTC.double() @ k_PKEC.double().mT * scaling + bias_P1TE
    sums_PKT = scores_PKTE.logsumexp(-1)
    out_PKTC = (scores_PKTE.softmax(-1) @ v_PKEC.double()).to(q_PKTC.dtype)
    return out_PKTC, sums_PKT.masked_fill(sums_PKT == -torch.inf, 1e9).float()


def random_case(kv_heads: int, width: int, extent: int, seen: float):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, kv_heads, n, 8, generator=generator) for n in (width, extent, extent))
    hidden = torch.rand(1, 1, width, extent, generator=generator) >= seen
    hidden[..., width % extent] = False  # everybody sees something
    return q, k, v, torch.zeros(1, 1, width, extent).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("seen", [1.0, 0.5, 0.02, 0.0])
def test_attention_in_parts_is_attention(parts, seen):
    q, k, v, bias = random_case(2, 5, 64, seen)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)
    found = in_parts(q, k, v, bias, 0.3, parts, by_formula)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_parts_are_views_of_the_cache():
    cached = torch.randn(1, 100, 2, 8)
    k = cached[:, :64].transpose(1, 2)

    def kernel(q, k_PKEC, v_PKEC, bias, scaling):
        storages = {x.untyped_storage().data_ptr() for x in (k_PKEC, v_PKEC)}
        assert storages == {cached.untyped_storage().data_ptr()}
        return by_formula(q, k_PKEC, v_PKEC, bias, scaling)

    q, _, _, bias = random_case(2, 3, 64, 0.5)
    in_parts(q, k, k, bias, 1.0, 4, kernel)


def test_keys_are_split_where_few_heads_would_keep_a_gpu_busy(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(module, "can_split", lambda device: True)

    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    found = {
        (heads, extent): parts_of(device, 1, heads, extent)
        for heads in (8, 32)
        for extent in (256, 512, 2048, 2048 + 64)
    }
    # at most one part a 256 keys and as many as there are multiprocessors, and all of one size
    assert found == {
        (8, 256): 1,
        (8, 512): 2,
        (8, 2048): 8,
        (8, 2112): 8,
        (32, 256): 1,
        (32, 512): 2,
        (32, 2048): 4,
        (32, 2112): 4,
    }
    assert parts_of(device, 2, 8, 2048) == 1 and parts_of(CPU, 1, 8, 2048) == 1


def test_a_device_whose_kernel_is_wrong_is_not_split_and_says_so(monkeypatch, caplog):
    can_split.cache_clear()
    assert not can_split(CPU)  # has no such kernel
    assert "cannot be split on cpu" in caplog.text
    for kernel, right in ((by_formula, True), (lambda *a: (a[0], by_formula(*a)[1]), False)):
        can_split.cache_clear()
        monkeypatch.setattr(module, "by_efficient_kernel", kernel)
        assert can_split(CPU) == right
    can_split.cache_clear()


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("width, extent", [(1, 9), (4, 9), (9, 9)])
def test_the_end_of_a_prompt_needs_no_mask(group, width, extent):
    q = torch.randn(1, 2 * group, width, 8)
    k, v = torch.randn(2, 1, 2, extent, 8).unbind()
    seen = torch.ones(width, extent, dtype=torch.bool).tril(extent - width)
    expected, _ = attention(torch.nn.Module(), q, k, v, seen[None, None], 0.3)
    found, _ = attention(torch.nn.Module(), q, k, v, causal_lower_right(width, extent), 0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_texts_are_the_same_by_the_gpus_paths(family, monkeypatch):
    """Keys in parts, prompts without masks: on the CPU, with a stand-in for the one kernel."""
    prompts = random_prompts(5, 40, 130)
    expected = vanilla_texts(tiny(family), prompts, 16)
    monkeypatch.setattr(module, "parts_of", lambda d, rows, heads, extent: 4 if rows == 1 else 1)
    monkeypatch.setattr(module, "by_efficient_kernel", by_formula)
    monkeypatch.setattr(model, "has_flash", lambda device, dtype: True)
    lm = tiny(family)
    adapter = adapter_for(lm)
    for drafter in (Vanilla(), Kangaroo(lm, adapter, 4, 0.3), KangarooTree(lm, adapter, 3, 0.0)):
        for rows in (1, 2):
            done = Engine(lm, drafter, prefill_chunk=16).generate(prompts, 16, batch_size=rows)
            assert [p + g.tokens for p, g in zip(prompts, done, strict=True)] == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 4])
def test_a_gpu_attends_in_parts_as_at_once(dtype, group):
    device = torch.device("cuda", torch.cuda.current_device())
    assert can_split(device)
    q = torch.randn(1, 8 * group, 7, 128, device=device, dtype=dtype)
    cached = torch.randn(2, 1, 4096, 8, 128, device=device, dtype=dtype)
    k, v = cached[:, :, :2048].transpose(2, 3).unbind()
    bias = torch.zeros(1, 1, 7, 2048, device=device, dtype=dtype)
    bias[..., 300:] = -torch.inf
    found, _ = attention(torch.nn.Module(), q, k, v, bias, 0.1)
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    expected = F.scaled_dot_product_attention(
        q.float(), k, v, attn_mask=bias.float(), scale=0.1
    ).transpose(1, 2)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-2)
