"""An adapter as a transformers model."""

import pytest
import torch
from helpers import EXIT, adapter_for, random_prompts, tiny

from kangaroo.errors import ConfigError
from kangaroo.trained.adapter import Architecture
from kangaroo.trained.draft_head import DraftHead
from kangaroo.trained.export import draft_model, truncated


@pytest.mark.parametrize("parts", [{}, {"feed_forward": True}, {"own_head": True}], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_exported_model_says_what_the_adapter_says(family, parts):
    lm = tiny(family, tie_word_embeddings=family == "qwen3")
    adapter = adapter_for(lm, architecture=Architecture(**parts))
    tokens_1T = torch.tensor(random_prompts(12))
    with torch.no_grad():
        block = lm.chunk(0, 12, 0, 12)
        f_1TD, _ = lm.run(lm.embed(tokens_1T), None, block, range(EXIT))
        ours = DraftHead(lm, adapter.head)(adapter(f_1TD, None, block, None)[0])
        theirs = draft_model(lm, adapter)(tokens_1T).logits[0]
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


def test_it_shares_the_targets_weights():
    lm = tiny()
    state, own = draft_model(lm, adapter_for(lm)).state_dict(), lm.hf.state_dict()
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.up_proj.weight",
    ):
        assert state[name].data_ptr() == own[name].data_ptr()


def test_a_truncated_target_is_its_first_layers():
    lm, tokens_1T = tiny(), torch.tensor(random_prompts(9))
    with torch.no_grad():
        x_1TD, _ = lm.run(lm.embed(tokens_1T), None, lm.chunk(0, 9, 0, 9), range(EXIT))
        expected = lm.logits(x_1TD)
        found = truncated(lm, EXIT)(tokens_1T).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", [{"fused": True}, {"attention": False, "feed_forward": True}])
def test_what_is_no_layer_is_refused(parts):
    lm = tiny()
    with pytest.raises(ConfigError, match="layer of a transformers model"):
        draft_model(lm, adapter_for(lm, architecture=Architecture(**parts)))
