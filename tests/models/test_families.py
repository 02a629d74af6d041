"""Families that transformers' modules run: windows, capped scores, multipliers, norms, experts.

`tests/drafters/test_conformance.py` decodes with them by every drafter.
"""

import pytest
import torch
import training_cases
from cases import DRAFTERS, NEW_TOKENS, PROMPTS, Case, samplings
from helpers import BY_MODULES, EXIT, adapter_for, random_prompts, tiny, vanilla_texts
from torch.nn.attention.bias import causal_lower_right
from training_cases import config, recipe, samples, train
from transformers import Gemma3TextConfig, MistralConfig, Phi3Config, Qwen2Config

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.adapter_files import target_hash
from kangaroo.heads.export import draft_model
from kangaroo.models.attention import attention
from kangaroo.models.layer_weights import can_record, is_plain
from kangaroo.models.supported import window_of
from kangaroo.training.checkpoint import read_metrics
from kangaroo.utils.errors import ConfigError

nothing_is_drawn = pytest.fixture(autouse=True)(training_cases.nothing_is_drawn)

OTHERS = list(BY_MODULES)


def family(name):
    architecture, fields = BY_MODULES[name]
    return tiny(architecture, **fields)


# ---- windows -----------------------------------------------------------------------------------


def test_a_window_is_that_of_the_layers_that_the_config_names():
    assert window_of(MistralConfig(num_hidden_layers=2)) == (4096, [True] * 2)
    assert window_of(MistralConfig(sliding_window=None))[0] is None
    assert window_of(Phi3Config(sliding_window=2047))[0] == 2047
    some = {"use_sliding_window": True, "sliding_window": 128, "num_hidden_layers": 4}
    assert window_of(Qwen2Config(**some, max_window_layers=2)) == (128, [False] * 2 + [True] * 2)
    assert window_of(Qwen2Config(**some, max_window_layers=4)) == (None, [False] * 4)
    assert window_of(Qwen2Config())[0] is None


def test_a_window_that_no_text_outgrows_is_none_unless_its_layers_rotate_in_another_way():
    assert window_of(MistralConfig(max_position_embeddings=4096))[0] is None
    assert is_plain(tiny("mistral", sliding_window=512).hf)
    short = Gemma3TextConfig(max_position_embeddings=512, sliding_window=512, num_hidden_layers=6)
    assert window_of(short) == (512, [True] * 5 + [False])


@pytest.mark.parametrize(
    "name", ["kangaroo-tree", "tree-from-exit", "eagle-tree", "lookahead-tree"]
)
@pytest.mark.parametrize("window", [2, 3])
def test_a_tree_may_be_deeper_than_the_window(name, window):
    """What a node sees of its own ancestors ends there, too."""
    lm, how = tiny("mistral", sliding_window=window), samplings("sampled")
    pairs = list(zip(PROMPTS, how, strict=True))
    texts = [vanilla_texts(lm, [prompt], NEW_TOKENS, own)[0] for prompt, own in pairs]
    engine = Engine(lm, DRAFTERS[name](Case(lm, adapter_for(lm), texts)))
    requests = [Request(prompt, NEW_TOKENS, own.seed) for prompt, own in pairs]
    done = dict(engine.completions(requests, Sampling(temperature=0.8, seed=3), 4))
    assert [p + done[i].tokens for i, p in enumerate(PROMPTS)] == texts


# ---- what their layers compute -----------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2])
def test_capped_scores_are_the_formula_with_every_mask(group):
    q, (k, v) = torch.randn(2, 2 * group, 5, 8), torch.randn(2, 2, 2, 9, 8)
    seen = torch.ones(5, 9, dtype=torch.bool).tril(4)
    scores = q @ k.repeat_interleave(group, 1).mT * 3
    weights = (2 * (scores / 2).tanh()).masked_fill(~seen, -torch.inf).softmax(-1)
    expected = (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)
    added = torch.zeros(5, 9).masked_fill(~seen, -torch.inf)[None, None]
    for mask in (seen[None, None], added, causal_lower_right(5, 9)):
        found, _ = attention(torch.nn.Module(), q, k, v, mask, 3.0, softcap=2.0)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    read = torch.tensor([[False, True, False, True, True]] * 2)
    found, _ = attention(torch.nn.Module(), q, k, v, added, 3.0, read, softcap=2.0)
    torch.testing.assert_close(found[read], expected[read], rtol=0, atol=1e-5)
    assert not found[~read].any()


@pytest.mark.parametrize("name", OTHERS)
def test_native_code_kernels_and_graphs_take_what_they_know(name):
    lm = family(name)
    assert not is_plain(lm.hf) and lm.compile_for_decoding().fast_layers is None
    assert can_record(lm.hf) == (name not in ("mixtral", "qwen3-moe"))


def test_what_a_family_adds_is_part_of_the_target_that_an_adapter_is_for():
    hashes = {target_hash(family(name)) for name in OTHERS}
    changed = [tiny("gemma2", final_logit_softcapping=9.0), tiny("mistral", sliding_window=8)]
    assert len(hashes | set(map(target_hash, changed))) == len(OTHERS) + 2


# ---- adapters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_an_adapter_learns_is_saved_and_drafts(name, tmp_path):
    lm, wide = family(name), {"fused": True, "draft_steps": 2, "feed_forward": True}
    some = [recipe(name="plain"), recipe(name="wide", **wide)]
    settings = config(epochs=6, holdout=1, learning_rate=1e-2)
    folders = train(lm, samples(6), settings, tmp_path, recipes=some)
    for folder in folders:
        rows = [row for row in read_metrics(tmp_path) if f"train/{folder.name}/loss" in row]
        losses = [row[f"train/{folder.name}/loss"] for row in rows]
        assert sum(losses[-4:]) < sum(losses[:4]) - 0.2
        adapter, heads = adapter_files.load(str(folder), lm, Adapter)
        engine = Engine(lm, Kangaroo(lm, adapter, 3, 0.0, heads[0]))
        prompt = random_prompts(30)
        (done,) = engine.generate(prompt, 20)
        assert prompt[0] + done.tokens == vanilla_texts(lm, prompt, 20)[0]


@torch.no_grad()
@pytest.mark.parametrize("name", OTHERS)
def test_an_adapter_begins_as_the_targets_layer_with_its_windows_and_multipliers(name):
    """But for norms after the attention, which it does not have."""
    lm = family(name)
    adapter = Adapter(lm, EXIT).start_from(lm)
    meta, f_1TD = lm.chunk(0, 40, 0, 40), torch.randn(1, 40, 32)
    layer = lm.layers[EXIT]
    for norm in ("post_attention_layernorm", "post_feedforward_layernorm"):
        if hasattr(layer, "post_feedforward_layernorm"):
            setattr(layer, norm, torch.nn.Identity())
    layer.mlp.forward = torch.zeros_like
    if not hasattr(layer, "input_layernorm"):
        f_1TD = adapter.input_norm(f_1TD)  # of ones, so that a second one changes nothing
    expected = lm.norm(lm.run(f_1TD, None, meta, range(EXIT, EXIT + 1))[0])
    adapter.norm.load_state_dict(lm.hf.model.norm.state_dict())
    torch.testing.assert_close(adapter(f_1TD, None, meta, None), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", OTHERS)
def test_a_draft_model_says_what_the_adapter_says_or_is_refused(name):
    lm, tokens_1T = family(name), torch.tensor(random_prompts(40))
    adapter = adapter_for(lm)
    if hasattr(lm.layers[0], "post_feedforward_layernorm"):
        with pytest.raises(ConfigError, match=f"{lm.config.model_type} layers have norms after"):
            draft_model(lm, adapter)
        return
    meta = lm.chunk(0, 40, 0, 40)
    f_1TD, _ = lm.run(lm.embed(tokens_1T), None, meta, range(EXIT))
    expected = adapter.draft_heads(lm, None)[0](adapter(f_1TD, None, meta, None)[0])
    found = draft_model(lm, adapter)(tokens_1T).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
