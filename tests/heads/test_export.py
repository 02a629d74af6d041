"""An adapter as a transformers model, in memory and on disk, whatever differs by layer; and for the
plugin of vLLM."""

import json
import re
from dataclasses import asdict

import helpers
import pytest
import torch
from cases import in_turn
from commands import ROOT
from helpers import EXIT, adapter_for, eagle3_for, eagle_for, saved_adapter, states_after, tiny
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from kangaroo import ConfigError, DraftModelConfig
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.eagle3_head import fused_taps
from kangaroo.heads.eagle_head import EagleHead
from kangaroo.heads.export import draft_model, save, write_for_vllm, write_speculators
from kangaroo.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from kangaroo.models.loading import Dtype, ModelConfig, byte_tokenizer, load
from kangaroo.models.supported import target_hashes
from kangaroo.models.target import TargetModel

# A family, whether its embeddings are tied, and an adapter's parts; all that each of them changes.
LAYERS = [
    ("llama", False, {}),
    ("qwen2", False, {"feed_forward": True}),
    ("llama", False, {"own_head": True}),
    ("qwen3", True, {"own_head": True}),
    ("llama", True, {"attention": False, "feed_forward": True}),
    ("qwen3", True, {"attention_layers": 2}),
    ("qwen2", False, {"attention_layers": 3, "feed_forward": True}),  # as deep as the target
    ("llama", True, {"attention_layers": 3}),
]
FEW_K = torch.tensor([3, 5, 7])
PARTS = [({},), ({"attention_layers": 3, "feed_forward": True},)]
KINDS = {
    "fused": lambda lm: adapter_for(lm, EXIT, AdapterHeadConfig(fused=True)),
    "medusa_heads": lambda lm: MedusaHeads(lm, MedusaHeadsConfig(heads=2)),
    "eagle_head": eagle_for,
    "eagle3_head": eagle3_for,
}
OURS = {  # which are models, but not of the plugin's
    "2 attention layers": lambda lm: adapter_for(lm, EXIT, AdapterHeadConfig(attention_layers=2)),
    "mlp": lambda lm: adapter_for(lm, EXIT, AdapterHeadConfig(attention=False, feed_forward=True)),
    "on embeddings": lambda lm: adapter_for(lm, 0),
}


def target(folder, family="llama", **overrides):
    tiny(family, **{"vocab_size": 259, "eos_token_id": 257} | overrides).hf.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return ModelConfig("mine", str(folder), dtype=Dtype.float32, device="cpu", compiled=False)


def saved(lm, adapter, folder, vocabulary=None):
    return str(saved_adapter(lm, adapter, folder, (7, 3, 5), vocabulary=vocabulary))


@pytest.mark.parametrize("family, tied, parts", LAYERS, ids=str)
def test_a_saved_draft_model_is_whole_and_says_what_the_adapter_says(tmp_path, family, tied, parts):
    model = target(tmp_path / "target", family, tie_word_embeddings=tied)
    lm = TargetModel(load(model)[0])
    adapter = adapter_for(lm, architecture=AdapterHeadConfig(**parts))
    path = saved(lm, adapter, tmp_path / "adapter", None if "own_head" in parts else 2)
    save(path, model, tmp_path / "draft")
    options = {"dtype": torch.float32, "output_loading_info": True}
    exported, report = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", **options)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert exported.config.tie_word_embeddings == (tied and "own_head" not in parts)
    tokens = [5, 250, 17, 99, 100, 3]
    with torch.no_grad():
        theirs = exported(torch.tensor([tokens])).logits[0]
        x_1TD = adapter(states_after(lm, tokens, EXIT), None, lm.chunk(0, 6, 0, 6), None)
    drafter = DraftModelConfig(adapter=path).build(lm)  # which drafts from the whole vocabulary
    assert torch.equal(theirs, helpers.forward_logits(drafter.lm, tokens))
    torch.testing.assert_close(theirs, DraftHead(lm, adapter.head)(x_1TD[0]), atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    talk = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(talk) == byte_tokenizer().apply_chat_template(talk)
    # to Qwen2's, transformers adds a token
    assert tokenizer.get_vocab().items() >= byte_tokenizer().get_vocab().items()


def test_the_pages_example_of_an_assistant_runs(tmp_path, monkeypatch):
    model = target(tmp_path / "TARGET", max_position_embeddings=128)
    lm = TargetModel(load(model)[0])
    save(saved(lm, adapter_for(lm), tmp_path / "adapter"), model, tmp_path / "smollm2-draft")
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "assistant" in c)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(code, "serving.md", "exec"), names)
    alone = names["target"].generate(**names["inputs"], max_new_tokens=64)
    assert torch.equal(names["output"], alone)


@pytest.mark.parametrize("kind", [*KINDS, *OURS])
def test_what_cannot_be_exported_is_refused_before_anything_is_read_or_written(tmp_path, kind):
    lm, out = tiny(), tmp_path / "out"
    path = saved(lm, (KINDS | OURS)[kind](lm), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="kangaroo-vllm cannot run"):
        write_for_vllm(path, lm, out, threshold=0.6)
    if kind in KINDS:
        with pytest.raises(ConfigError, match=f"{kind}.*Export one of adapter=attention"):
            save(path, ModelConfig("mine", str(tmp_path / "nowhere")), out)
    else:
        with pytest.raises(ConfigError, match=r"trained adapter, and speculators .*=eagle3"):
            write_speculators(path, lm, out)
    assert not out.exists()


def test_an_own_head_over_some_tokens_is_refused(tmp_path):
    lm, parts = tiny(), AdapterHeadConfig(own_head=True)
    adapter = parts.build(lm, EXIT, torch.tensor([3, 5, 7]))
    path = saved(lm, adapter, tmp_path / "adapter", vocabulary=3)
    with pytest.raises(ConfigError, match=r"knows 3 tokens.*trainer\.vocabulary=null"):
        save(path, ModelConfig("mine", str(tmp_path)), tmp_path / "draft")
    with pytest.raises(ConfigError, match="knows 3 tokens"):
        draft_model(lm, adapter)


def as_speculators(folder, few_K):
    """A head of EAGLE-3, its target, and what is written of it."""
    lm = tiny()
    head = eagle3_for(lm, few_K)
    path = saved(lm, head, folder / "head", None if few_K is None else len(few_K))
    write_speculators(path, lm, folder / "out")
    return lm, head, load_file(folder / "out/model.safetensors")


@pytest.mark.parametrize("few_K", [FEW_K, None], ids=["some", "all"])
def test_a_head_of_eagle3_is_written_as_vllm_reads_it(tmp_path, few_K):
    """Taps are numbers of layers below; d2t holds offsets; embeddings are the target's."""
    lm, head, weights = as_speculators(tmp_path, few_K)
    fields = json.loads((tmp_path / "out/config.json").read_text())
    parts = ("self_attn.q_proj", "mlp.up_proj", "input_layernorm", "hidden_norm")
    assert {f"layers.0.{part}.weight" for part in parts} | {"fc.weight", "norm.weight"} < {*weights}
    assert len(weights) == len(head.state_dict()) + (0 if few_K is None else 2)
    if few_K is not None:
        assert torch.equal(torch.arange(3) + weights["d2t"], few_K)
        assert torch.equal(weights["t2d"].nonzero()[:, 0], few_K)
    assert fields["eagle_aux_hidden_state_layer_ids"] == list(fused_taps(lm.n_layers))
    assert fields["draft_vocab_size"] == (64 if few_K is None else 3)
    assert fields["speculators_config"]["verifier"]["name_or_path"] == lm.name
    layer = fields["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"]) == ("llama", 64)


@torch.no_grad()
@pytest.mark.parametrize("few_K", [FEW_K, None], ids=["some", "all"])
def test_the_library_speculators_reads_the_head_and_computes_the_same(tmp_path, few_K):
    library = pytest.importorskip("speculators")
    lm, ours, weights = as_speculators(tmp_path, few_K)
    config = library.Eagle3SpeculatorConfig.from_pretrained(tmp_path / "out")
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = library.Eagle3DraftModel(config)
    report = theirs.load_state_dict(weights, strict=False)
    verifiers = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert {*report.missing_keys} == verifiers and not report.unexpected_keys
    states_1TD = torch.randn(1, 7, 3 * lm.config.hidden_size)
    e_1TD, fused_1TD = lm.embed(torch.tensor([[9, 8, 7, 6, 5, 4, 3]])), ours.fuse(states_1TD)
    all_1TD = ours(e_1TD, fused_1TD, lm.chunk(0, 7, 0, 7), None)
    expected_1TD = all_1TD[:, 1:]  # the first has no pair
    (head,) = ours.draft_heads(lm, few_K)
    pairs_1TD = torch.cat([e_1TD, theirs.fc(states_1TD)], -1)[:, 1:]
    rope = theirs.rotary_emb(pairs_1TD, 1 + torch.arange(6)[None])
    mask_11TT = torch.full((1, 1, 6, 6), -torch.inf).triu(1)
    got_1TD = theirs.layers[0](pairs_1TD, mask_11TT, position_embeddings=rope)
    torch.testing.assert_close(got_1TD, expected_1TD)
    torch.testing.assert_close(theirs.lm_head(theirs.norm(got_1TD))[0], head(expected_1TD[0]))


def test_no_export_is_written_over_a_folder_that_is_there(tmp_path):
    model, there = target(tmp_path / "target"), tmp_path / "there"
    lm = TargetModel(load(model)[0])
    path = saved(lm, adapter_for(lm), tmp_path / "adapter")
    there.mkdir()
    for write in (lambda: save(path, model, there), lambda: write_for_vllm(path, lm, there, 0.6)):
        with pytest.raises(ConfigError, match="there already, and nothing is written over it"):
            write()
    assert not any(there.iterdir())
    assert {file.name for file in tmp_path.iterdir()} == {"target", "adapter", "there"}


@pytest.mark.parametrize("parts", [{}, {"feed_forward": True}, {"own_head": True}], ids=str)
@pytest.mark.parametrize("vocabulary", [None, 2])
def test_the_plugin_is_told_what_it_needs(tmp_path, parts, vocabulary):
    lm, architecture = tiny(), AdapterHeadConfig(**parts)
    vocabulary_K = None if vocabulary is None else torch.tensor([3, 7])  # of 7, 3, 5
    adapter = architecture.build(lm, EXIT, vocabulary_K).start_from(lm, vocabulary_K)
    path = saved(lm, adapter, tmp_path / "adapter", vocabulary)
    write_for_vllm(path, lm, tmp_path / "out", threshold=0.6)
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    expected = dict(adapter.state_dict())
    if vocabulary_K is not None:
        expected["vocabulary"] = vocabulary_K
    state = load_file(tmp_path / "out/model.safetensors")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["kangaroo"] == {
        **{"format": 1, "exit_layer": EXIT, "target_layers": 4, "threshold": 0.6},
        "architecture": {"kind": "adapter"} | asdict(architecture),
        "draft_vocabulary": vocabulary,
    }
    assert config["architectures"] == ["KangarooDraft"] and config["num_hidden_layers"] == 1
    kept = "model_type hidden_size rms_norm_eps vocab_size rope_parameters head_dim".split()
    assert {name: config[name] for name in kept} == {n: getattr(lm.config, n) for n in kept}


WINDOWS = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# The schedules of `helpers.ARCHITECTURES`, and others that configs of these families may have.
SCHEDULES = helpers.ARCHITECTURES | {
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


def scheduled(name):
    family, fields = SCHEDULES[name]
    return tiny(family, **fields)


@pytest.mark.parametrize("name", [x for x in SCHEDULES if x not in WITH_NORMS_AFTER])
def test_a_layer_that_copies_the_targets_computes_what_the_target_does(name):
    """So it has the window, the rotation and the experts of the layer that it is like."""
    lm, last = scheduled(name), 3
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
    how = {"position_embeddings": place.rope, "attention_mask": place.bias_R1TE}
    output_1TD, _ = eagle.attention(x_1TD, **how)
    assert_close(output_1TD, lm.layers[last].self_attn(x_1TD, **how)[0], atol=1e-5, rtol=1e-5)


def test_an_adapter_is_not_for_a_target_whose_other_layers_rotate():
    made = [target_hashes(scheduled(name).config)[0] for name in ("smollm3", "smollm3-listed")]
    assert made[0] != made[1]


@pytest.mark.parametrize("name, parts", in_turn(SCHEDULES, PARTS))
def test_an_exported_model_says_what_the_adapter_says_whatever_the_schedule(tmp_path, name, parts):
    lm = scheduled(name)
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
