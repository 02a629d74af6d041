"""Trained layers and exports keep what differs by layer: windows, rotation, experts."""

import pytest
import torch
from cases import in_turn
from helpers import ARCHITECTURES, EXIT, adapter_for, states_after, tiny
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.eagle_head import EagleHead
from kangaroo.heads.export import draft_model
from kangaroo.models.supported import target_hashes
from kangaroo.utils.errors import ConfigError

WINDOWS = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# The schedules of `ARCHITECTURES`, and others that configs of these families may have.
SCHEDULES = ARCHITECTURES | {
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}),
    "smollm3-windows": ("smollm3", {"sliding_window": 7, "use_sliding_window": True}),
    "qwen2-windows": ("qwen2", {"sliding_window": 7, "use_sliding_window": True}),
    "qwen3-windows": ("qwen3", {"sliding_window": 7, "use_sliding_window": True}),
    "qwen3-moe-listed": ("qwen3_moe", {"mlp_only_layers": [0, 2]} | EXPERTS),
    "qwen3-moe-third": ("qwen3_moe", {"decoder_sparse_step": 3} | EXPERTS),
}
for _name in ("smollm3-windows", "qwen2-windows", "qwen3-windows"):
    SCHEDULES[_name][1]["layer_types"] = WINDOWS
WITH_NORMS_AFTER = ("gemma2", "gemma3", "olmo2", "olmo3")
TOKENS = torch.randint(64, (24,), generator=torch.Generator().manual_seed(4)).tolist()


def target(name):
    family, fields = SCHEDULES[name]
    return tiny(family, **fields)


@pytest.mark.parametrize("name", [x for x in SCHEDULES if x not in WITH_NORMS_AFTER])
def test_a_layer_that_copies_the_targets_computes_what_the_target_does(name):
    """So it has the window, the rotation and the experts of the layer that it is like."""
    lm, last = target(name), 3
    whole, meta = AdapterHeadConfig(feed_forward=True), lm.chunk(0, len(TOKENS), 0, len(TOKENS))
    for exit_layer in range(1, lm.n_layers):
        adapter = adapter_for(lm, exit_layer, whole)
        states_1TD = adapter(states_after(lm, TOKENS, exit_layer), None, meta, None)
        expected_1TD = adapter.norm(states_after(lm, TOKENS, exit_layer + 1))
        assert_close(states_1TD, expected_1TD, atol=1e-5, rtol=1e-5)
    eagle = EagleHead(lm).requires_grad_(False)
    eagle.copy_layers(lm, last)
    place = meta.for_layer(eagle.windowed)
    x_1TD = states_after(lm, TOKENS, last)
    outputs = [
        attention(x_1TD, position_embeddings=place.rope, attention_mask=place.bias_R1TE)[0]
        for attention in (eagle.attention, lm.layers[last].self_attn)
    ]
    assert_close(*outputs, atol=1e-5, rtol=1e-5)


def test_an_adapter_is_not_for_a_target_whose_other_layers_rotate():
    made = [target_hashes(target(name).config)[0] for name in ("smollm3", "smollm3-listed")]
    assert made[0] != made[1]


PARTS = [({},), ({"attention_layers": 3, "feed_forward": True},)]


@pytest.mark.parametrize("name, parts", in_turn(SCHEDULES, PARTS))
def test_an_exported_model_says_what_the_adapter_says_whatever_the_schedule(tmp_path, name, parts):
    lm = target(name)
    meta = lm.chunk(0, len(TOKENS), 0, len(TOKENS))
    for exit_layer in range(1, lm.n_layers):
        adapter = adapter_for(lm, exit_layer, AdapterHeadConfig(**parts))
        if name in WITH_NORMS_AFTER:
            with pytest.raises(ConfigError, match="norms after their parts, an adapter has none"):
                draft_model(lm, adapter)
            continue
        exported = draft_model(lm, adapter)
        if exit_layer == EXIT:  # once from its files, too
            exported.save_pretrained(tmp_path)
            exported = AutoModelForCausalLM.from_pretrained(tmp_path)
        f_1TD = states_after(lm, TOKENS, exit_layer)
        with torch.no_grad():
            theirs_TV = exported(torch.tensor([TOKENS])).logits[0]
        expected_TV = DraftHead(lm)(adapter(f_1TD, None, meta, None)[0])
        assert_close(theirs_TV, expected_TV, atol=1e-4, rtol=1e-4)
