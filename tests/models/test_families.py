"""What transformers' modules run: families with windows, capped scores, multipliers, other norms or
experts, and targets with quantized weights.

`tests/drafters/test_conformance.py` decodes with the families by every drafter.
"""

import json
from functools import partial
from tempfile import TemporaryDirectory

import helpers
import pytest
import torch
import transformers
from cases import HOW, case_for, check_texts
from helpers import EXIT, VOCABULARY, adapter_for, random_prompts, tiny, tiny_model, vanilla_texts
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from training_cases import config, recipe, samples, train
from transformers import Gemma3TextConfig, MistralConfig, PreTrainedTokenizerFast, Qwen2Config

from kangaroo.engine.engine import Engine
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.export import draft_model
from kangaroo.models import loading, quantizing
from kangaroo.models.layer_weights import can_record, is_plain, packed_linears
from kangaroo.models.loading import TINY, Dtype, ModelConfig, load_target, meta_model, random_model
from kangaroo.models.quantizing import Quantization, quantize
from kangaroo.models.supported import target_hashes, windows
from kangaroo.models.target import TargetModel
from kangaroo.training.estimate import target_bytes
from kangaroo.training.results import read_metrics
from kangaroo.utils.errors import ConfigError, MissingPackage, UnsupportedModel
from kangaroo.utils.memory import footprint, weight_bytes

QUANTIZED_BY = """kangaroo kangaroo-tree kangaroo-fused-layer eagle-tree block hybrid-tree
draft_verify medusa kangaroo-vocabulary prompt-lookup-short""".split()


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


def compressed(scheme: str) -> TargetModel:
    """From a checkpoint of compressed-tensors, the form of today's GPTQ, AWQ and FP8 checkpoints,
    which transformers unpacks in its first forward."""
    by = pytest.importorskip("compressed_tensors.quantization", reason="needs the extra quantized")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    hf, how = tiny_model("qwen2"), by.preset_name_to_scheme(scheme, ["Linear"])
    how.weights.group_size = how.weights.group_size and 16
    settings = by.QuantizationConfig(config_groups={"layers": how}, ignore=["lm_head"])
    by.apply_quantization_config(hf, settings)
    for linear in hf.model.layers.modules():
        if hasattr(linear, "weight_scale"):
            groups = linear.weight.unflatten(1, (-1, how.weights.group_size or linear.in_features))
            ranges = groups.amin(-1).detach(), groups.amax(-1).detach()
            linear.weight_scale.data.copy_(calculate_qparams(*ranges, how.weights)[0])
    with TemporaryDirectory() as folder:
        compressor = ModelCompressor.from_pretrained_model(hf)
        compressor.compress_model(hf)
        hf.save_pretrained(folder)
        compressor.update_config(folder)
        save_tokenizer(folder)
        return load_target(ModelConfig("m", folder, dtype=Dtype.float32, device="cpu"))[0]


def pack(numbers_RC: torch.Tensor, order=range(8)) -> torch.Tensor:
    """Eight numbers of 4 bits beside each other as one of 32, the first in the lowest bits."""
    numbers = numbers_RC.long().unflatten(1, (-1, 8))[..., list(order)]
    return (numbers << 4 * torch.arange(8)).sum(-1).to(torch.uint32).view(torch.int32)


def packed_by_hand(method: str, kernel: str, even: bool = False, act_order: bool = False):
    """From a checkpoint in GPTQ's or AWQ's own format, groups of 32 inputs with a zero point in
    the middle if `even`. By default gptqmodel would first compile its kernel, for two minutes."""
    pytest.importorskip("gptqmodel")
    hf = tiny_model("qwen2")
    state, axis = hf.state_dict(), (0, 2, 4, 6, 1, 3, 5, 7) if method == "awq" else range(8)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        weight_IO, base = state.pop(name).T, name.removesuffix("weight")
        inputs_I, count = torch.arange(len(weight_IO)), len(weight_IO) // 32
        groups_I = inputs_I % count if act_order else inputs_I // 32
        largest = [weight_IO[groups_I == group].abs().amax(0) for group in range(count)]
        scales_GO = state[f"{base}scales"] = (torch.stack(largest) / 5).half()
        zeros_GO = 8 + (torch.arange(scales_GO.numel()).view_as(scales_GO) % 5 - 2) * (not even)
        numbers_IO = (weight_IO / scales_GO[groups_I]).round() + zeros_GO[groups_I]
        if method == "gptq":  # whose zero points count from one
            state[f"{base}qweight"] = pack(numbers_IO.T).T.contiguous()
            state[f"{base}g_idx"], zeros_GO = groups_I.int(), zeros_GO - 1
        else:
            state[f"{base}qweight"] = pack(numbers_IO, axis)
        state[f"{base}qzeros"] = pack(zeros_GO, axis)
    how = {"quant_method": method, "bits": 4, "group_size": 32, "backend": kernel}
    with TemporaryDirectory() as folder:
        save_checkpoint(hf, state, how | {"desc_act": act_order, "sym": even}, folder)
        return load_target(ModelConfig("m", folder, dtype=Dtype.float32, device="cpu"))[0]


def save_checkpoint(hf, state: dict[str, torch.Tensor], how: dict[str, object], folder) -> None:
    hf.config.quantization_config = how
    hf.config.save_pretrained(folder)
    save_file(state, f"{folder}/model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)


def save_tokenizer(folder) -> None:
    """A tokenizer of `tiny_model`'s tokens."""
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCABULARY)}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def quantized(how: Quantization) -> TargetModel:
    pytest.importorskip(how.package, reason="needs the extra quantized")
    hf = tiny_model("qwen2")
    quantize(hf, how, "cpu")
    return TargetModel(hf)


FAMILIES = {name: partial(tiny, kind, **of) for name, (kind, of) in helpers.BY_MODULES.items()}
QUANTIZED = {"packed": packed} | {how.value: partial(quantized, how) for how in Quantization}
QUANTIZED |= {f"compressed-{x}": partial(compressed, x) for x in ("W4A16", "FP8_DYNAMIC")}
QUANTIZED |= {
    "gptq": partial(packed_by_hand, "gptq", "gptq_torch_aten", even=True),
    "gptq-act-order": partial(packed_by_hand, "gptq", "gptq_torch_aten", act_order=True),
    "awq": partial(packed_by_hand, "awq", "torch_awq"),
}
of_families = pytest.mark.parametrize("name", FAMILIES)
of_quantized = pytest.mark.parametrize("name", QUANTIZED)


SOME = {"use_sliding_window": True, "sliding_window": 128, "num_hidden_layers": 4}
OF_GEMMA = {"max_position_embeddings": 512, "sliding_window": 512, "num_hidden_layers": 6}


@pytest.mark.parametrize(
    "config, window, windowed",
    [
        (MistralConfig(num_hidden_layers=2), 4096, [True] * 2),
        (MistralConfig(num_hidden_layers=2, sliding_window=None), None, [False] * 2),
        (Qwen2Config(**SOME, max_window_layers=2), 128, [False] * 2 + [True] * 2),
        (Qwen2Config(**SOME, max_window_layers=4), None, [False] * 4),
        # one that no text outgrows is none, unless its layers rotate in another way
        (MistralConfig(num_hidden_layers=2, max_position_embeddings=4096), None, [False] * 2),
        (Gemma3TextConfig(**OF_GEMMA), 512, [True] * 5 + [False]),
    ],
)
def test_a_window_is_that_of_the_layers_that_the_config_names(config, window, windowed):
    assert windows(config) == (window, windowed)


@pytest.mark.parametrize("window", [2, 3])
def test_a_tree_may_be_deeper_than_the_window(window):
    """What a node sees of its own ancestors ends there, too."""
    case = case_for(tiny("mistral", sliding_window=window), "sampled")
    for drafter in ("kangaroo-tree", "tree-from-exit", "eagle-tree", "lookahead-tree"):
        check_texts(case, drafter, "sampled", 4)


@of_families
def test_native_code_kernels_and_graphs_take_what_they_know(name):
    lm = FAMILIES[name]()
    assert not is_plain(lm.hf) and lm.compile_for_decoding().fast_layers is None
    assert is_plain(tiny("mistral", sliding_window=512).hf)  # which no text outgrows
    assert can_record(lm.hf) == (name not in ("mixtral", "qwen3-moe"))


def test_what_a_family_adds_is_part_of_the_target_that_an_adapter_is_for():
    changed = [tiny("gemma2", final_logit_softcapping=9.0), tiny("mistral", sliding_window=8)]
    targets = [*(family() for family in FAMILIES.values()), *changed]
    assert len({target_hashes(lm.config)[0] for lm in targets}) == len(targets)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if i % 6 == 4 else pytest.mark.slow)
        for i, name in enumerate([*FAMILIES, *QUANTIZED])
    ],
)
def test_an_adapter_learns_is_saved_and_drafts(name, tmp_path):
    lm, wide = (FAMILIES | QUANTIZED)[name](), {"fused": True, "draft_steps": 2}
    some = [recipe(name="plain"), recipe(name="wide", feed_forward=True, **wide)]
    settings = config(epochs=6, holdout=1, learning_rate=1e-2)
    for folder in train(lm, samples(6), settings, tmp_path, recipes=some):
        key = f"train/{folder.name}/loss"
        losses = [row[key] for row in read_metrics(tmp_path) if key in row]
        assert sum(losses[-4:]) < sum(losses[:4]) - 0.2
        adapter, heads = adapter_files.load(str(folder), lm, Adapter)
        prompt = random_prompts(30)
        (done,) = Engine(lm, helpers.chain_of(lm, adapter, 3, 0.0, heads[0])).generate(prompt, 20)
        assert prompt[0] + done.tokens == vanilla_texts(lm, prompt, 20)[0]


@torch.no_grad()
@pytest.mark.parametrize("name", [*FAMILIES, "llama", "qwen2", "qwen3"])
def test_an_adapter_begins_as_the_targets_layer_with_all_that_its_family_adds(name):
    """But for norms after the attention, which it does not have."""
    lm = FAMILIES[name]() if name in FAMILIES else tiny(name)
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


@pytest.mark.slow
@of_quantized
def test_drafters_write_what_the_quantized_model_writes_itself(name):
    lm = QUANTIZED[name]().compile_for_decoding()
    for number, how in enumerate(HOW):
        case = case_for(lm, how)
        for drafter in QUANTIZED_BY[number :: len(HOW)]:
            check_texts(case, drafter, how, 1 + number % 4)


# FP8 and AWQ round inputs, AWQ to float16
@pytest.mark.parametrize("name", [x for x in QUANTIZED if "FP8" not in x and x != "awq"])
def test_an_adapter_begins_with_what_the_quantized_layer_multiplies_with(name):
    lm = QUANTIZED[name]()
    x = torch.randn(1, 7, 32)
    ours, theirs = Adapter(lm, 2).start_from(lm).attention.q_proj, lm.layers[2].self_attn.q_proj
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)  # sums of 32 in float32
    exact = tiny("qwen2").layers[2].self_attn.q_proj
    assert (theirs(x) - exact(x)).abs().max() > 1e-4  # it is quantized


@of_quantized
def test_what_reads_plain_weights_leaves_a_quantized_model_alone(name):
    lm, plain = QUANTIZED[name](), tiny("qwen2")
    assert len(packed_linears(lm.layers)) == 7 * lm.n_layers and not packed_linears(plain.hf)
    assert not is_plain(lm.hf) and is_plain(plain.hf)
    assert lm.compile_for_decoding().fast_layers is None
    assert lm.fingerprint == QUANTIZED[name]().fingerprint != plain.fingerprint
    assert can_record(lm.hf) == (name in ("int8", "int4"))
    if not name.startswith("compressed"):  # which transformers unpacks
        assert footprint(lm, []).bytes < footprint(plain, []).bytes
        ratio = weight_bytes(*lm.layers) / weight_bytes(*plain.layers)
        assert 0.1 < ratio < 0.5  # of float32; with scales
    with pytest.raises(ConfigError, match="draft model: its weights are quantized"):
        draft_model(lm, adapter_for(lm))
    with pytest.raises(ConfigError, match="is quantized already"):
        quantize(lm.hf, Quantization.int8, "cpu")


def test_a_quantized_head_is_refused_by_name():
    hf = tiny_model()
    hf.lm_head = Packed(hf.lm_head)
    with pytest.raises(UnsupportedModel, match=r"LM head of 'llama' is quantized.*lm_head"):
        TargetModel(hf)


@pytest.mark.parametrize("four_bits", [True, False])
def test_a_checkpoint_by_bitsandbytes_gives_a_token_the_same_beside_any_other(tmp_path, four_bits):
    pytest.importorskip("bitsandbytes", reason="needs the extra quantized")
    how = transformers.BitsAndBytesConfig(load_in_4bit=four_bits, load_in_8bit=not four_bits)
    random_model("llama", deep_scale=0.15).save_pretrained(tmp_path / "plain")
    options = {"quantization_config": how, "device_map": "cpu", "dtype": torch.float32}
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options)
    hf.save_pretrained(tmp_path / "packed")
    loading.byte_tokenizer().save_pretrained(tmp_path / "packed")
    config = ModelConfig("m", str(tmp_path / "packed"), dtype=Dtype.float32, device="cpu")
    if not four_bits:
        with pytest.raises(UnsupportedModel, match=r"LLM.int8.*llm_int8_threshold=0"):
            load_target(config)
        return
    lm, _ = load_target(config)
    check_texts(case_for(lm, HOW[0]), "kangaroo", HOW[0], 2)


def save_fp8(folder, dtype: torch.dtype, **sizes: int) -> dict[str, torch.Tensor]:
    """A checkpoint of FP8 in blocks of 32 by 32, the rest in `dtype`; returns its exact weights."""
    hf, exact = tiny_model("llama", **sizes), {}
    state = {name: weight.to(dtype) for name, weight in hf.state_dict().items()}
    for name in [name for name in state if name.endswith("_proj.weight")]:
        rows, columns = state[name].shape
        scales = 0.75 + torch.rand(-(-rows // 32), -(-columns // 32)) / 2
        state[name], state[f"{name}_scale_inv"] = state[name].to(torch.float8_e4m3fn), scales
        each = scales.repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
        exact[name] = each * state[name].float()
    save_checkpoint(hf, state, {"quant_method": "fp8", "weight_block_size": [32, 32]}, folder)
    return exact


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies FP8 itself")
@pytest.mark.parametrize("of_file", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", Dtype)
def test_fp8_on_a_cpu_is_a_plain_model_of_the_dtype_asked_for(tmp_path, of_file, dtype):
    exact = save_fp8(tmp_path, of_file)
    lm, _ = load_target(ModelConfig("m", str(tmp_path), dtype=dtype, device="cpu"))
    assert is_plain(lm.hf) and {x.dtype for x in lm.hf.parameters()} == {dtype.torch}
    for name, weight in exact.items():
        assert torch.equal(lm.hf.get_parameter(name), weight.to(dtype.torch))
    if dtype is not Dtype.float16:  # without native code
        check_texts(case_for(lm, HOW[0]), "kangaroo", HOW[0], 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies FP8 itself")
@pytest.mark.parametrize("size", [48, 80])  # transformers loads the one, wrongly
def test_fp8_blocks_that_do_not_divide_a_size_are_refused_on_a_cpu(tmp_path, size):
    save_fp8(tmp_path, torch.float32, intermediate_size=size)
    with pytest.raises(UnsupportedModel, match=r"quantized \(fp8\).*made from, with .*=int8"):
        load_target(ModelConfig("m", str(tmp_path), dtype=Dtype.float32, device="cpu"))


@pytest.mark.parametrize("how", Quantization)
def test_a_package_that_is_missing_is_named_with_the_extra(monkeypatch, how):
    monkeypatch.setattr(quantizing, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=rf"={how.value} needs .*{how.package}.*\[quantized\]"):
        loading.load(ModelConfig("tiny", TINY, device="cpu", quantization=how))


@pytest.mark.parametrize("how", Quantization)
def test_a_checkpoint_and_a_random_model_load_quantized(tmp_path, how):
    pytest.importorskip(how.package, reason="needs the extra quantized")
    random_model("llama", deep_scale=0.15).save_pretrained(tmp_path)
    loading.byte_tokenizer().save_pretrained(tmp_path)
    options = {"dtype": Dtype.float32, "device": "cpu", "quantization": how}
    models = [load_target(ModelConfig("m", path, **options))[0] for path in (TINY, str(tmp_path))]
    texts = [vanilla_texts(lm, [list(range(40, 60))], 12) for lm in models]
    assert texts[0] == texts[1] and len(packed_linears(models[1].hf)) == 7 * 6


def test_experts_are_not_quantized_here():
    with pytest.raises(UnsupportedModel, match="mixtral model are experts'"):
        quantize(tiny_model("mixtral"), Quantization.int8, None)


def test_the_estimate_knows_what_a_quantized_checkpoint_takes(tmp_path):
    random_model().config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    about, whole = json.loads(file.read_text()), meta_model(ModelConfig("m", str(tmp_path)))
    of_fp8 = 8 if torch.cuda.is_available() else 16
    methods = {"gptq": ({"bits": 4}, 4), "bitsandbytes": ({"load_in_4bit": True}, 4)}
    for method, (options, bits) in (methods | {"fp8": ({}, of_fp8)}).items():
        fields = {"quant_method": method} | options
        file.write_text(json.dumps(about | {"quantization_config": fields}))
        lm = meta_model(ModelConfig("m", str(tmp_path)))
        layers = sum(p.numel() for p in lm.layers.parameters())
        assert target_bytes(whole) - target_bytes(lm) == layers * (16 - bits) // 8
    for how, bits in zip(Quantization, (8, 4, 4), strict=True):
        assert meta_model(ModelConfig("m", TINY, quantization=how)).weight_bits == bits
