"""A target with quantized weights decodes and is drafted for as it is: by its own modules."""

import json

import pytest
import torch
from cases import CHUNK, DRAFTERS, HOW, NEW_TOKENS, PROMPTS, Case, samplings
from helpers import adapter_for, random_prompts, tiny, tiny_model, vanilla_texts
from torch import nn
from training_cases import config, nothing_is_drawn, recipe, samples, train

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.footprint import footprint
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.export import draft_model
from kangaroo.models import quantizing
from kangaroo.models.layer_weights import can_record, is_plain, packed_linears
from kangaroo.models.loading import (
    TINY,
    Dtype,
    ModelConfig,
    byte_tokenizer,
    load,
    load_target,
    meta_model,
    random_model,
)
from kangaroo.models.quantizing import Quantization, quantize
from kangaroo.models.target import TargetModel
from kangaroo.training.checkpoint import read_metrics
from kangaroo.training.estimate import target_bytes
from kangaroo.utils.errors import ConfigError, MissingPackage, UnsupportedModel
from kangaroo.utils.memory import weights


class Packed(nn.Module):
    """A linear layer as GPTQ and AWQ have it: it holds no weight, and shows none."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales_O = linear.weight.abs().amax(1) / 127
        self.register_buffer("qweight", (linear.weight / scales_O[:, None]).round().char())
        self.register_buffer("scales", scales_O)
        self.register_buffer("bias", linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        products = x @ self.qweight.to(x.dtype).T * self.scales
        return products if self.bias is None else products + self.bias


def packed(architecture: str = "qwen2") -> TargetModel:
    """A model that came from a checkpoint that was quantized already."""
    hf = tiny_model(architecture)
    for layer in hf.model.layers:
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                layer.set_submodule(name, Packed(linear))
    return TargetModel(hf.requires_grad_(False))


def by_torchao(how: Quantization, **options: str) -> TargetModel:
    pytest.importorskip("torchao")
    hf = tiny_model("qwen2")
    quantize(hf, how, "cpu")
    return TargetModel(hf)


TARGETS = {
    "packed": packed,
    "int8": lambda: by_torchao(Quantization.int8),
    "int4": lambda: by_torchao(Quantization.int4),
}
SOME = ["kangaroo", "kangaroo-tree", "kangaroo-fused-layer", "eagle-tree", "block", "hybrid-tree"]
SOME += ["draft_verify", "medusa", "kangaroo-vocabulary", "prompt-lookup-short"]


@pytest.mark.parametrize("name", TARGETS)
def test_drafters_write_what_the_quantized_model_writes_itself(name):
    lm = TARGETS[name]().compile_for_decoding()
    adapter, texts = adapter_for(lm), {}
    for number, drafter in enumerate(SOME):
        how = HOW[number % len(HOW)]
        if how not in texts:
            pairs = zip(PROMPTS, samplings(how), strict=True)
            texts[how] = [vanilla_texts(lm, [p], NEW_TOKENS, own)[0] for p, own in pairs]
        engine = Engine(lm, DRAFTERS[drafter](Case(lm, adapter, texts[how])), prefill_chunk=CHUNK)
        requests = [
            Request(prompt, NEW_TOKENS, own.seed, sampling=own)
            for prompt, own in zip(PROMPTS, samplings(how), strict=True)
        ]
        done = dict(engine.completions(requests, Sampling(), 1 + number % 4))
        assert [p + done[i].tokens for i, p in enumerate(PROMPTS)] == texts[how], drafter


@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_begins_with_what_the_quantized_layer_multiplies_with(name):
    lm = TARGETS[name]()
    adapter = Adapter(lm, 2).start_from(lm)
    x = torch.randn(1, 7, 32)
    ours, theirs = adapter.attention.q_proj, lm.layers[2].self_attn.q_proj
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)  # sums of 32 in float32
    exact = tiny("qwen2").layers[2].self_attn.q_proj
    assert (theirs(x) - exact(x)).abs().max() > 1e-4  # it is quantized


@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_learns_on_a_quantized_target_and_drafts_for_it(name, tmp_path, monkeypatch):
    nothing_is_drawn(monkeypatch)
    lm, settings = TARGETS[name](), config(epochs=6, holdout=1, learning_rate=1e-2)
    (folder,) = train(lm, samples(6), settings, tmp_path, recipes=[recipe(name="plain")])
    key = f"train/{folder.name}/loss"
    losses = [row[key] for row in read_metrics(tmp_path) if key in row]
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.2
    adapter, heads = adapter_files.load(str(folder), lm, Adapter)
    prompt = random_prompts(30)
    (done,) = Engine(lm, Kangaroo(lm, adapter, 3, 0.0, heads[0])).generate(prompt, 20)
    assert prompt[0] + done.tokens == vanilla_texts(lm, prompt, 20)[0]
    assert footprint(lm, []).bytes < footprint(tiny("qwen2"), []).bytes


@pytest.mark.parametrize("name", TARGETS)
def test_what_reads_plain_weights_leaves_a_quantized_model_alone(name):
    lm, plain = TARGETS[name](), tiny("qwen2")
    assert len(packed_linears(lm.layers)) == 7 * lm.n_layers and not packed_linears(plain.hf)
    assert not is_plain(lm.hf) and is_plain(plain.hf)
    assert lm.compile_for_decoding().fast_layers is None
    assert lm.fingerprint == TARGETS[name]().fingerprint != plain.fingerprint
    assert can_record(lm.hf) == (name != "packed")
    assert 0.2 < weights(*lm.layers) / weights(*plain.layers) < 0.5  # int8, float32 scales, norms
    with pytest.raises(ConfigError, match="draft model: its weights are quantized"):
        draft_model(lm, adapter_for(lm))
    with pytest.raises(ConfigError, match="is quantized already"):
        pytest.importorskip("torchao")
        quantize(lm.hf, Quantization.int8, "cpu")


def test_a_quantized_head_is_refused_by_name():
    hf = tiny_model()
    hf.lm_head = Packed(hf.lm_head)
    with pytest.raises(UnsupportedModel, match=r"LM head of 'llama' is quantized.*lm_head"):
        TargetModel(hf)


def test_a_package_that_is_missing_is_named_with_the_extra(monkeypatch):
    monkeypatch.setattr(quantizing, "find_spec", lambda name: None)
    config = ModelConfig("tiny", TINY, device="cpu", quantization=Quantization.int8)
    with pytest.raises(MissingPackage, match=r"quantization=int8 needs .*torchao.*\[quantized\]"):
        load(config)


@pytest.mark.parametrize("how", Quantization)
def test_a_checkpoint_and_a_random_model_load_quantized(tmp_path, how):
    pytest.importorskip("torchao")
    random_model("llama", deep_scale=0.15).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    options = {"dtype": Dtype.float32, "device": "cpu", "quantization": how}
    models = [load_target(ModelConfig("m", path, **options))[0] for path in (TINY, str(tmp_path))]
    prompt = [list(range(40, 60))]
    texts = [vanilla_texts(lm, prompt, 12) for lm in models]
    assert texts[0] == texts[1] and len(packed_linears(models[1].hf)) == 7 * 6


def test_experts_are_not_quantized_here():
    pytest.importorskip("torchao")
    with pytest.raises(UnsupportedModel, match="mixtral model are experts'"):
        quantize(tiny_model("mixtral"), Quantization.int8, None)


@pytest.mark.parametrize(
    "fields, bits",
    [
        ({"quant_method": "gptq", "bits": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "fp8"}, 8),
    ],
)
def test_the_estimate_knows_what_a_quantized_checkpoint_takes(tmp_path, fields, bits):
    random_model().config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    whole = target_bytes(meta_model(ModelConfig("m", str(tmp_path))))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": fields}))
    lm = meta_model(ModelConfig("m", str(tmp_path)))
    layers = sum(p.numel() for p in lm.layers.parameters())
    assert whole - target_bytes(lm) == layers * (16 - bits) // 8
    lm = meta_model(ModelConfig("m", TINY, quantization=Quantization.int8))
    assert lm.weight_bits == 8
