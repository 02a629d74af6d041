"""transformers' `generate`, drafted by an adapter: the same tokens, and the model as it was.

Shapes: B rows, T tokens.
"""

import copy
import re
import runpy
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from commands import ROOT
from helpers import adapter_for, eagle3_for, eagle_for, random_prompts, saved_adapter, tiny_model
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LogitsProcessorList
from transformers.generation.logits_process import MinLengthLogitsProcessor
from transformers.generation.streamers import BaseStreamer

from kangaroo import ConfigError, PromptError, Sampling
from kangaroo.cpu.stepper import CpuStepper
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.session import Session
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from kangaroo.hub.transfer import PackConfig, pack
from kangaroo.models.loading import byte_tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.utils import errors

EOS, PAD = [7, 14, 25, 31, 38, 47], 0
PROMPTS = [[token or 1 for token in p] for p in random_prompts(5, 9, 2, seed=3)]  # none is PAD
NEW_TOKENS = 24
NAMED = "outputs/pack/USER/NAME"
MODELS = "llama:eager:attention mistral:sdpa:attention qwen2:eager:attention qwen3:sdpa:fused "
MODELS += "llama:sdpa:medusa llama:sdpa:eagle llama:sdpa:eagle3"


@pytest.fixture(autouse=True)
def fetched_code(tmp_path, monkeypatch):
    """transformers copies code to a folder of its own before it runs it."""
    place = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", place)
    monkeypatch.syspath_prepend(place)


def target(family: str = "llama", attention: str = "sdpa", **overrides: object):
    """Somebody's model, whose texts end now and then."""
    hf = tiny_model(family, **({"eos_token_id": EOS, "pad_token_id": PAD} | overrides))
    hf.set_attn_implementation(attention)
    return hf


def packed(hf, path, kind: str = "attention") -> str:
    """The folder to upload."""
    lm = TargetModel(copy.deepcopy(hf))
    about = {"vocabulary": 40 if kind == "attention" else None}
    if kind == "medusa":
        adapter = MedusaHeads(lm, MedusaHeadsConfig(heads=2, own_head=False)).start_from(lm)
        about["facts"] = {"guesses": [[0.5, 0.2]] * 2}
    elif kind == "eagle":
        adapter = eagle_for(lm)
    elif kind == "eagle3":
        adapter = eagle3_for(lm)
    else:
        adapter = adapter_for(lm, architecture=AdapterHeadConfig(fused=kind == "fused"))
    source = saved_adapter(lm, adapter, path / "made", range(63, 0, -1), **about)
    return str(pack(PackConfig(str(source), "someone/an-adapter", str(path / "packed"))))


@pytest.fixture
def hf():
    return target()


@pytest.fixture
def folder(hf, tmp_path) -> str:
    return packed(hf, tmp_path)


def padded(prompts=PROMPTS) -> dict[str, torch.Tensor]:
    """`[B, T]`, on the left."""
    longest = max(map(len, prompts))
    rows = [[PAD] * (longest - len(p)) + p for p in prompts]
    masks = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def ours(hf, folder: str, **options):
    return hf.generate(**options, custom_generate=folder, trust_remote_code=True)


@pytest.mark.parametrize("model", MODELS.split())
def test_the_tokens_are_generates_own_whatever_drafts(tmp_path, model):
    family, attention, kind = model.split(":")
    hf = target(family, attention)
    options = padded() | {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = hf.generate(**options)
    assert (expected[:, -1] == PAD).any() and (expected[:, -1] != PAD).any()
    assert torch.equal(ours(hf, packed(hf, tmp_path, kind), **options), expected)


@pytest.mark.parametrize(
    "options",
    [
        padded() | {"max_length": 20, "use_cache": True},
        padded() | {"max_new_tokens": 5, "eos_token_id": None},
        padded() | {"max_new_tokens": NEW_TOKENS, "eos_token_id": [7, 11, 23]},
        padded() | {"max_new_tokens": NEW_TOKENS, "pad_token_id": 33},
        padded() | {"generation_config": GenerationConfig(max_new_tokens=9, eos_token_id=23)},
        padded(),  # transformers' default length
        {"input_ids": padded()["input_ids"], "max_new_tokens": NEW_TOKENS},  # without a mask
        {"inputs": torch.tensor(PROMPTS[:1]), "max_new_tokens": NEW_TOKENS},
    ],
    ids=lambda options: " ".join(options),
)
def test_lengths_and_ends_are_generates_own(hf, folder, options):
    expected = hf.generate(**options)
    assert torch.equal(ours(hf, folder, **options), expected)
    named = ours(hf, folder, return_dict_in_generate=True, **options)
    assert torch.equal(named.sequences, expected)


def test_samples_are_those_of_the_engine_and_torchs_seed_fixes_them(hf, folder):
    how = {"temperature": 0.8, "top_p": 0.9, "top_k": 20}
    options = padded() | {"max_new_tokens": NEW_TOKENS, "do_sample": True} | how
    torch.manual_seed(5)
    sampled = ours(hf, folder, **options)
    torch.manual_seed(5)
    assert torch.equal(ours(hf, folder, **options), sampled)
    torch.manual_seed(5)
    seeds = torch.randint(2**62, (3,)).tolist()
    engine = Engine(TargetModel(hf), Vanilla())
    done = engine.generate(PROMPTS, NEW_TOKENS, Sampling(**how), seeds=seeds)
    for row, generation in zip(sampled[:, 9:].tolist(), done, strict=True):
        assert row[: len(generation.tokens)] == generation.tokens
        assert set(row[len(generation.tokens) :]) <= {PAD}
    many = ours(hf, folder, **options | padded(PROMPTS[:1]), num_return_sequences=3)
    assert len({tuple(row) for row in many.tolist()}) == 3


def test_a_streamer_hears_what_generates_own_says(hf, folder):
    theirs, streamed = (Mock(spec=BaseStreamer) for _ in range(2))
    options = {"input_ids": torch.tensor(PROMPTS[1:2]), "max_new_tokens": NEW_TOKENS}
    expected = hf.generate(streamer=theirs, **options)
    assert torch.equal(ours(hf, folder, streamer=streamed, **options), expected)
    parts, ours_said = (
        [value.flatten().tolist() for each in streamer.put.call_args_list for value in each.args]
        for streamer in (theirs, streamed)
    )
    assert parts == ours_said and streamed.mock_calls[-1] == call.end()


def state_of(hf) -> dict:
    return {
        "attention": hf.config._attn_implementation,
        "config": hf.config.to_dict(),
        "generation_config": hf.generation_config.to_dict(),
        "training": [module.training for module in hf.modules()],
        "hooks": [dict(module._forward_hooks) for module in hf.modules()],
        "members": [sorted(vars(module)) for module in hf.modules()],
        "identity": [(n, p.requires_grad, p.dtype, p.data_ptr()) for n, p in hf.named_parameters()],
        "weights": [p.detach().clone().tolist() for p in hf.parameters()],
        "buffers": [b.tolist() for b in hf.buffers()],
        "random": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("attention, fails", [("sdpa", False), ("eager", True)])
def test_the_model_is_left_as_it_was(tmp_path, attention, fails, monkeypatch):
    hf = target(attention=attention).train()
    hf.model.layers[1].eval()
    hf.model.layers[2].requires_grad_(False)
    hf.model.layers[0].register_forward_hook(lambda module, inputs, output: None)
    folder, options = packed(hf, tmp_path), padded() | {"max_new_tokens": 5}
    before = state_of(hf)
    if fails:
        monkeypatch.setattr(Session, "step", lambda session: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        ours(hf, folder, **options)
    assert state_of(hf) == before
    hf(padded()["input_ids"]).logits.sum().backward()  # it can be trained on
    assert hf.model.layers[0].mlp.up_proj.weight.grad is not None


@pytest.mark.parametrize("change", ["hook", "forward", "weight"])
def test_what_was_added_to_a_layer_counts(hf, folder, change, monkeypatch):
    """Native code would not know of it."""
    options, layer = padded() | {"max_new_tokens": NEW_TOKENS}, hf.model.layers[0]
    plain = hf.generate(**options)
    if change == "hook":
        layer.mlp.register_forward_hook(lambda module, inputs, output: -4 * output)
    elif change == "forward":
        forward = layer.mlp.forward
        monkeypatch.setattr(layer.mlp, "forward", lambda x_BTD: -4 * forward(x_BTD), raising=False)
    else:
        register_parametrization(layer.mlp.gate_proj, "weight", nn.ReLU())  # as LoRA's would
    expected = hf.generate(**options)
    assert not torch.equal(expected, plain)
    assert torch.equal(ours(hf, folder, **options), expected)


def test_a_plain_model_decodes_in_native_code(hf, folder, monkeypatch):
    """Transformers leaves hooks behind that only record."""
    hf(padded()["input_ids"], output_hidden_states=True)
    assert hf.model.layers[0]._forward_hooks
    step, steps = CpuStepper.step, []
    monkeypatch.setattr(CpuStepper, "step", lambda *args: steps.append(1) or step(*args))
    ours(hf, folder, **padded(), max_new_tokens=NEW_TOKENS)
    assert steps


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"num_beams": 2}, "beam_search"),
        ({"repetition_penalty": 1.1}, "RepetitionPenaltyLogitsProcessor"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"logits_processor": LogitsProcessorList([MinLengthLogitsProcessor(3, 7)])}, "logits_pro"),
        ({"stop_strings": "a", "tokenizer": byte_tokenizer()}, "stop_strings="),
        ({"generation_config": GenerationConfig(stop_strings=["a"])}, "stop_strings="),
        ({"token_healing": True, "tokenizer": byte_tokenizer()}, "token_healing="),
        ({"inputs_embeds": torch.zeros(3, 9, 32)}, "inputs_embeds="),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_is_not_done_is_refused_by_name(hf, folder, changes, name):
    before = state_of(hf)
    with pytest.raises(ConfigError, match=f"{name}.* is not supported when Kangaroo decodes"):
        ours(hf, folder, **padded() | {"max_new_tokens": 5} | changes)
    assert state_of(hf) == before


def test_a_prompt_or_a_model_that_does_not_fit_is_refused(tmp_path):
    hf = target(max_position_embeddings=32)
    folder = packed(hf, tmp_path)
    with pytest.raises(PromptError, match="the model's context is 32"):
        ours(hf, folder, **padded(), max_new_tokens=40)
    ids = torch.ones(1, 5, dtype=torch.long)
    for mask, said in {"11100": "pad on", "01011": "pad on", "00000": "0 of .* no token"}.items():
        with pytest.raises(PromptError, match=said):
            ours(hf, folder, input_ids=ids, attention_mask=torch.tensor([[*map(int, mask)]]))
    with pytest.raises(PromptError, match=r"shape \[0, 5\] hold no token"):
        ours(hf, folder, input_ids=ids[:0], attention_mask=ids[:0])
    hf.register_forward_hook(lambda module, inputs, output: None)
    with pytest.raises(ConfigError, match="a forward hook on the whole LlamaForCausalLM"):
        ours(hf, folder, **padded(), max_new_tokens=5)
    with pytest.raises(errors.AdapterMismatch, match="was trained for"):
        ours(target(num_hidden_layers=3), folder, **padded(), max_new_tokens=5)
    other = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))
    with pytest.raises(errors.UnsupportedModel, match="is a gpt2 model"):
        ours(other, folder, **padded(), max_new_tokens=5)


def test_another_adapter_may_be_named(hf, folder, tmp_path):
    (tmp_path / "other").mkdir()
    other = packed(hf, tmp_path / "other", "fused")
    options = padded() | {"max_new_tokens": NEW_TOKENS}
    assert torch.equal(ours(hf, folder, adapter=other, **options), hf.generate(**options))
    with pytest.raises(errors.AdapterNotFound, match=r"no adapter at 'no/where'.*adapter= its"):
        ours(hf, folder, adapter="no/where", **options)


def test_without_transformers_the_adapter_has_to_be_named():
    code = runpy.run_path(str(ROOT / "integrations/transformers/generate.py"))
    with pytest.raises(ConfigError, match="Pass adapter="):
        code["generate"](target(), **padded())


def test_the_pages_example_writes_what_the_model_would(tmp_path, monkeypatch):
    hf = target(vocab_size=259, max_position_embeddings=256)
    hf.save_pretrained(tmp_path / "TARGET")
    byte_tokenizer().save_pretrained(tmp_path / "TARGET")
    (tmp_path / NAMED).parent.mkdir(parents=True)
    Path(packed(hf, tmp_path)).rename(tmp_path / NAMED)  # it may lie anywhere
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page, flags=re.S) if NAMED in c)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(code, "serving.md", "exec"), names)
    alone = names["model"].generate(**names["inputs"], max_new_tokens=64)
    assert torch.equal(names["output"], alone)
