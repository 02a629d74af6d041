"""A target driven by layer ranges computes what transformers computes, however it attends, and its
cache writes where it is told.

Shapes as in `kangaroo/models/target.py` and `kangaroo/engine/cache.py`.
"""

import helpers
import pytest
import torch
from cases import FAMILIES
from helpers import LLAMA3_ROPE, VOCABULARY, adapter_for, random_prompts, tiny, vanilla_texts
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, Gemma3Config, Gemma3TextConfig, GemmaConfig, LlamaConfig

from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.cache import BUCKET, occupied
from kangaroo.engine.engine import Engine
from kangaroo.engine.tree import Tree
from kangaroo.models import target as model
from kangaroo.models.attention import attention
from kangaroo.models.supported import FULL, SUPPORTED, WINDOWED, check_supported, context
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import UnsupportedModel

FACTOR = {"rope_theta": 10000.0, "factor": 4.0}
ROPES = {
    "linear": {"rope_type": "linear"} | FACTOR,
    "llama3": LLAMA3_ROPE,
    "yarn": {"rope_type": "yarn", "original_max_position_embeddings": 32} | FACTOR,
}

# float32, four layers: what regrouping sums leaves of logits of size 10
TOLERANCE = 5e-5

MODELS = FAMILIES | {f"rope-{n}": lambda r=r: tiny(rope_parameters=r) for n, r in ROPES.items()}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
BOTH_WAYS = {"use_bidirectional_attention": True, "num_hidden_layers": 6}
REFUSED = [
    (GemmaConfig(name_or_path="google/a"), r"google/a' is a gemma model.*llama, mistral, qwen2"),
    (Gemma3Config(name_or_path="google/b"), r"'google/b' is a gemma3 model; .*gemma3_text model"),
    (Gemma3TextConfig(**BOTH_WAYS), r"use_bidirectional_attention.*a model that writes"),
    (LlamaConfig(rope_parameters=DYNAMIC, name_or_path="c/d"), "'c/d' uses 'dynamic' RoPE"),
]


@torch.no_grad()
def logits_in_pieces(lm: TargetModel, tokens: list[int], chunk: int, tail: int) -> torch.Tensor:
    """Prefill in chunks, then the last `tail` tokens as chains of three, like drafts."""
    n_slots = len(tokens) + 8
    cache = lm.new_cache(2, n_slots)
    layers = range(lm.n_layers)
    tokens_1T = torch.tensor([tokens])
    end = len(tokens) - tail
    logits = []
    for start in range(0, end, chunk):
        stop = min(start + chunk, end)
        meta = lm.chunk(start, stop, row=1, n_slots=n_slots)
        logits.append(lm.logits(lm.run(lm.embed(tokens_1T[:, start:stop]), cache, meta, layers)[0]))
    for start in range(end, len(tokens), 3):
        part_1N = tokens_1T[:, start : start + 3]
        tree = Tree.chain(part_1N.shape[1], part_1N.device)
        # row 0 decodes something else from its start on
        meta = lm.forward_meta(tree, torch.tensor([0, start]), start + tree.size, n_slots)
        x_2ND = lm.embed(torch.cat([part_1N.flip(1), part_1N]))
        logits.append(lm.logits(lm.run(x_2ND, cache, meta, layers)[0])[1:])
    return torch.cat(logits, 1)[0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_pieces_equal_those_of_transformers_in_one(name):
    lm = MODELS[name]()
    (tokens,) = random_prompts(BUCKET + 20)
    expected = helpers.forward_logits(lm, tokens)
    for chunk, tail in ((1000, 0), (16, 9), (1, BUCKET + 19), (BUCKET, 19)):
        logits_TV = logits_in_pieces(lm, tokens, chunk, tail)
        torch.testing.assert_close(logits_TV, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("width, extent", [(1, 9), (5, 9), (9, 9)])
def test_every_mask_and_none_give_the_formula_capped_or_not(width, extent, group, softcap):
    q, (k, v) = torch.randn(2, 2 * group, width, 8), torch.randn(2, 2, 2, extent, 8)
    visible = torch.ones(width, extent, dtype=torch.bool).tril(extent - width)
    scores = q @ k.repeat_interleave(group, 1).mT * 3
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)
    added = torch.zeros(width, extent).masked_fill(~visible, -torch.inf)[None, None]
    masks = [visible[None, None], added, causal_lower_right(width, extent)]
    for mask in [*masks, None] if width == extent else masks:
        out, _ = attention(torch.nn.Module(), q, k, v, mask, 3.0, softcap=softcap)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_texts_are_the_same_by_the_gpus_paths(monkeypatch):
    prompts = random_prompts(5, 40, 130)
    expected = vanilla_texts(tiny(), prompts, 16)
    monkeypatch.setattr(model, "has_flash", lambda device, dtype: True)
    adapter = adapter_for(lm := tiny())
    drafters = helpers.chain_of(lm, adapter, 4, 0.3), helpers.tree_of(lm, adapter, 3, 0.0)
    for drafter in (Vanilla(), *drafters):
        for rows in (1, 2):
            done = Engine(lm, drafter, prefill_chunk=16).generate(prompts, 16, batch_size=rows)
            assert [p + g.tokens for p, g in zip(prompts, done, strict=True)] == expected


@pytest.mark.parametrize("config, message", REFUSED)
def test_what_is_no_target_or_only_looks_like_a_family_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedModel, match=message):
        check_supported(config)
    with pytest.raises(UnsupportedModel, match="gemma"):
        tiny("gemma")


@pytest.mark.parametrize(
    "by_generation_config, by_config, expected",
    [
        (None, None, []),
        (None, 5, [5]),
        (7, 5, [7]),
        ([7, 8, 9], 5, [7, 8, 9]),
        (0, 5, [0]),
        (-1, 5, []),  # which says that no token ends a text
        ([-1, 7, VOCABULARY], 5, [7]),
    ],
)
def test_every_eos_id_is_known(by_generation_config, by_config, expected):
    lm = tiny()
    lm.hf.generation_config.eos_token_id = by_generation_config
    lm.config.eos_token_id = by_config
    assert lm.eos_ids() == expected
    assert Engine(lm, Vanilla()).eos_ids == set(expected)


YARN = {"rope_type": "yarn", "factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OF_128 = {"original_max_position_embeddings": 128}
# RoPE's parameters, `max_position_embeddings`, and other fields of configs for 512 positions
CONTEXTS = {
    "unscaled": ({"rope_type": "default"}, 512, {}),
    "yarn": (YARN | OF_128, 512, {}),
    "yarn as Qwen2.5's cards switch it on": (YARN | OF_128, 128, {}),
    "yarn as Qwen3's cards switch it on": (YARN | OF_128, 160, {}),
    "yarn without the original length": (YARN, 128, {}),
    "linear": (LINEAR, 512, {}),
    "linear as in Vicuna's long versions": (LINEAR, 128, {"max_sequence_length": 512}),
    "linear with the original length": (LINEAR | OF_128, 128, {}),
    "llama3": (LLAMA3 | OF_128 | {"factor": 32.0}, 512, {}),
    "llama3 switched on by hand": (LLAMA3 | OF_128, 128, {}),
}


@pytest.mark.parametrize("scaled", CONTEXTS)
@pytest.mark.parametrize("family", [family for family in SUPPORTED if family != "phi3"])  # unscaled
def test_the_context_is_the_length_that_rope_is_scaled_to(family, scaled):
    rope, length, more = CONTEXTS[scaled]
    rope = {"rope_theta": 10000.0} | rope
    if family == "gemma3_text":  # whose layer types have a RoPE each
        rope = {FULL: rope, WINDOWED: {"rope_theta": 10000.0, "rope_type": "default"}}
    fields = {"rope_parameters": rope, "max_position_embeddings": length, "pad_token_id": 0}
    assert context(AutoConfig.for_model(family, **fields, **more)) == 512


class Moves(TorchDispatchMode):
    """Sees every tensor that is copied to the meta device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_to_copy" and out.device.type == "meta":
            self.count += 1
        return out


@torch.no_grad()
def test_layers_on_a_second_device_get_their_inputs_there():
    """The meta device stands for a second GPU: it takes shapes, and refuses to mix with the CPU."""
    lm = tiny()
    lm.layers[2:].to("meta")
    lm.layer_devices[2:] = [torch.device("meta")] * 2
    cache = lm.new_cache(1, 20)
    assert [k.device.type for k in cache.keys] == ["cpu", "cpu", "meta", "meta"]
    with Moves() as moves:
        meta = lm.forward_meta(Tree.chain(3, lm.device), torch.tensor([0]), 3, 20)
        x_1ND, taps = lm.run(lm.embed(torch.tensor([[1, 2, 3]])), cache, meta, range(4), (1, 2, 4))
    assert x_1ND.device.type == "meta" and x_1ND.shape == (1, 3, 32)
    devices = {tap: state.device.type for tap, state in taps.items()}
    assert devices == {1: "cpu", 2: "cpu", 4: "meta"}
    assert moves.count == 6  # state, slots, positions, bias, cosine, sine: once, not once a layer
    cache.move(torch.tensor([[1]]), torch.tensor([[0]]))


def test_the_extent_is_bucketed_and_never_beyond_the_allocation():
    assert occupied(1000, 1) == occupied(1000, BUCKET) == BUCKET
    assert occupied(1000, BUCKET + 1) == 2 * BUCKET
    assert occupied(100, BUCKET + 1) == 100


def test_a_target_multiplies_alike_whatever_the_process_has_set():
    products = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("medium")
    products.allow_bf16_reduced_precision_reduction = True
    products.allow_fp16_reduced_precision_reduction = True
    products.allow_fp16_accumulation = True
    tiny()
    assert torch.get_float32_matmul_precision() == "highest" and not products.allow_tf32
    assert products.fp32_precision == "ieee" and not products.allow_fp16_accumulation
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction
