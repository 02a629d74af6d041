"""Checkpoints of the authors' code draft here what they draft there.

Shapes: T tokens of a text, D hidden size, V vocabulary.
"""

import json
from pathlib import Path

import helpers
import pytest
import torch
from helpers import EXIT, adapter_for, hidden_states, random_prompts, saved_adapter, tiny
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from kangaroo import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile, KangarooConfig
from kangaroo.engine.engine import Engine
from kangaroo.heads import adapter_files, published
from kangaroo.heads.base import Trainable
from kangaroo.models.loading import Dtype, ModelConfig, meta_model
from kangaroo.models.target import TargetModel

FILES = (published.WEIGHTS, published.SAFETENSORS)
THRESHOLD, STEPS = 0.6, 6
NAMES = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in published.KANGAROO.items()}
OTHER_TARGETS = [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    *({"attention_bias": True}, {"head_dim": 16}, {"architecture": "mistral"}),
]
NORM = "layers.0.input_layernorm.weight"
MISFIT = r" Pass model= .* not tiny/llama"
# Other tensors, another config, and what is said. No shape shows the last three.
REFUSED = {
    "a head": ({"lm_head.weight": torch.ones(64, 32)}, {}, r"lm_head\.weight has no .*" + MISFIT),
    "whole numbers": ({"norm.weight": torch.ones(32, dtype=torch.int8)}, {}, "floating point"),
    "one missing": ({NORM: None}, {}, r"lacks .*input_layernorm\.weight\." + MISFIT),
    "not finite": ({NORM: torch.full((32,), torch.nan)}, {}, r"input_norm\.weight .* not finite"),
    "a shape": ({NORM: torch.ones(40)}, {}, r"norm\.weight is \[40\], not \[32\]\." + MISFIT),
    "other heads": ({}, {"num_attention_heads": 8}, "heads=8; tiny/llama has 4.*model="),
    "another epsilon": ({}, {"rms_norm_eps": 1e-5}, "eps=1e-05; tiny/llama has 1e-06.*model="),
    "more tokens": ({}, {"vocab_size": 65}, "vocab_size=65; tiny/llama has 64.*model="),
}


def read(source: str, lm: TargetModel, exit_layer: int) -> tuple[Trainable, dict[str, str]]:
    imported = published.read(source, lm, exit_layer)
    return imported.adapter, imported.origin


def random_state(lm: TargetModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights around those of the layer above the exit: often right, and never the target's own."""
    base = adapter_for(lm).state_dict()
    base["norm.weight"] *= 2  # as sure of its tokens, here and there, as a trained one
    base["attention.o_proj.weight"] *= 3  # so that what it attends to matters
    generator = torch.Generator().manual_seed(3)
    return {
        name: (base[ours] + 0.02 * torch.randn(base[ours].shape, generator=generator)).to(dtype)
        for name, ours in NAMES.items()
    }


def config_of(lm: TargetModel, **changes: object) -> dict[str, object]:
    """As data/vicuna_7B_config.json of the authors' repository."""
    fields: dict[str, object] = {"model_type": "llama", "num_hidden_layers": 1, "pad_token_id": 0}
    for name in ("hidden_size", published.EPSILON, *published.COMPARED):
        fields[name] = getattr(lm.config, name)
    return fields | {"torch_dtype": "float16"} | changes


def checkpoint(folder: Path, state: object, config: object, file: str = published.WEIGHTS) -> str:
    folder.mkdir(exist_ok=True)
    (torch.save if file == published.WEIGHTS else save_file)(state, folder / file)
    (folder / published.CONFIG).write_text(json.dumps(config))
    return str(folder)


def plain_model(lm: TargetModel, state: dict[str, Tensor]) -> LlamaModel:
    """`f' = f + MHA(LN(f))`, then `LN(f')`, section 3.2: a layer of transformers without its MLP.
    The authors' names are its own."""
    model = LlamaModel(LlamaConfig(**config_of(lm), attn_implementation="eager"))
    model.layers[0].mlp.forward = torch.zeros_like
    model.load_state_dict(state, strict=False)
    return model


@torch.no_grad()
def plain_draft(lm: TargetModel, model: LlamaModel, text: list[int]) -> list[int]:
    """What the official loop drafts after a text, its last token the pending one: at most six
    tokens, none after one whose probability is below the threshold."""
    drafted: list[int] = []
    for _ in range(STEPS):
        f_1TD = hidden_states(lm, text + drafted)[EXIT]
        logits_V = lm.head.weight @ model(inputs_embeds=f_1TD).last_hidden_state[0, -1]
        drafted.append(int(logits_V.argmax()))
        if logits_V.softmax(-1).max() < THRESHOLD:
            break
    return drafted


@pytest.mark.parametrize(
    "file, dtype", [(published.WEIGHTS, torch.float16), (published.SAFETENSORS, torch.float32)]
)
def test_an_imported_checkpoint_drafts_what_its_formulas_give(lm, tmp_path, file, dtype):
    """And keeps every bit, and says where it came from."""
    state = random_state(lm, dtype)
    source = checkpoint(tmp_path / "official", state, config_of(lm), file)
    adapter, origin = read(source, lm, EXIT)
    path = str(saved_adapter(lm, adapter, tmp_path / "ours", None, {"imported": origin}))
    weights = adapter_files.read_weights(tmp_path / "ours")
    assert all(torch.equal(weights[NAMES[n]], x) for n, x in state.items())
    config = adapter_files.read_config(path)
    assert (config.target, config.exit_layer, config.vocabulary) == ("tiny/llama", EXIT, None)
    origin = config.training["imported"]
    assert (origin["source"], origin["file"]) == (source, file) and len(origin["sha256"]) == 16
    drafter = KangarooConfig(adapter=path, steps=STEPS, threshold=THRESHOLD).build(lm)
    model = plain_model(lm, state)
    lengths = helpers.check_chains(drafter, lambda text, seed, count: plain_draft(lm, model, text))
    engine = Engine(lm, drafter, prefill_chunk=8)
    done = engine.generate(random_prompts(1, 2, 7, 19, 30), 24, batch_size=2)
    steps = [step for generation in done for step in generation.steps]
    assert {1, STEPS} <= lengths and len(lengths) > 3  # stopped by doubt, early, late, or not
    accepted = {(s.accepted > 0, s.accepted == s.drafted) for s in steps if s.drafted}
    assert accepted == {(True, True), (True, False), (False, False)}  # whole, in part, not at all


def test_the_released_checkpoints_fit_vicuna_by_shape_alone(tmp_path):
    """At the exit layers of the authors' code, with the paper's number of parameters."""
    for name, size, layer in (("7b", 4096, 2), ("13b", 5120, 3)):
        vicuna = meta_model(ModelConfig(name, f"lmsys/vicuna-{name}-v1.3", dtype=Dtype.float16))
        shapes = {name: (size, size) if "proj" in name else (size,) for name in NAMES}
        state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        for given, expected in ((None, layer), (5, 5)):
            adapter = published.kangaroo_adapter(tmp_path, state, vicuna, given)
            assert adapter.exit_layer == expected
            assert sum(p.numel() for p in adapter.parameters()) == 4 * size**2 + 2 * size


def test_what_is_no_official_checkpoint_is_refused_by_what_it_lacks(lm, tmp_path):
    with pytest.raises(AdapterNotFound, match=r"no adapter at 'nobody/nothing'.*source="):
        read("nobody/nothing", lm, EXIT)
    with pytest.raises(AdapterNotFound, match=r"none of pytorch_model\.bin, model\.safetensors"):
        read(str(tmp_path), lm, EXIT)
    source = checkpoint(tmp_path, random_state(lm), config_of(lm))
    (tmp_path / published.CONFIG).unlink()
    with pytest.raises(AdapterNotFound, match=r"no config\.json.*vicuna_7B_config\.json"):
        read(source, lm, EXIT)


@pytest.mark.parametrize("kind, length", [("bin", 0), ("old bin", -1), ("safetensors", -1)])
def test_truncated_weights_are_reported_as_such(lm, tmp_path, kind, length):
    state, file = random_state(lm), FILES[kind == "safetensors"]
    source = checkpoint(tmp_path, state, config_of(lm), file)
    if kind == "old bin":  # as torch saved it before version 1.6
        torch.save(state, tmp_path / file, _use_new_zipfile_serialization=False)
        read(source, lm, EXIT)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:length])
    with pytest.raises(CorruptFile, match=rf"{file}' cannot be read .* Fetch it again"):
        read(source, lm, EXIT)


@pytest.mark.parametrize("held", [[1, 2], {"a": {"b": torch.ones(1)}}, {"a": print}], ids=str)
def test_a_file_of_something_else_is_refused(lm, tmp_path, held):
    """A function would be code to run: it is not even loaded."""
    reason = "more than tensors" if "print" in str(held) else "something other than a state dict"
    with pytest.raises(CorruptFile, match=f"{published.WEIGHTS}.* {reason}"):
        read(checkpoint(tmp_path, held, config_of(lm)), lm, EXIT)


@pytest.mark.parametrize("what", REFUSED)
def test_anything_but_the_papers_adapter_for_this_target_is_refused_by_name(lm, tmp_path, what):
    tensors, fields, message = REFUSED[what]
    state = {name: x for name, x in (random_state(lm) | tensors).items() if x is not None}
    with pytest.raises(CorruptFile if what == "not finite" else AdapterMismatch, match=message):
        read(checkpoint(tmp_path, state, config_of(lm, **fields)), lm, EXIT)


@pytest.mark.parametrize("fields", OTHER_TARGETS, ids=str)
def test_a_target_that_the_official_code_does_not_know_is_refused(lm, tmp_path, fields):
    other = tiny(**fields)
    other.config.name_or_path = "some/other"
    source = checkpoint(tmp_path / "official", random_state(lm), config_of(lm))
    with pytest.raises(AdapterMismatch, match=r"some/other is a .*base 10000.*model="):
        read(source, other, EXIT)


def test_an_exit_layer_has_to_be_given_where_it_is_not_known(lm, tmp_path):
    source = checkpoint(tmp_path, random_state(lm), config_of(lm))
    with pytest.raises(ConfigError, match=r"tiny/llama.*2 for lmsys/vicuna-7b.*exit_layer="):
        published.read(source, lm)
    with pytest.raises(AdapterMismatch, match=r"exit layer 4 .*choose 0, the embeddings, to 3"):
        read(source, lm, 4)
