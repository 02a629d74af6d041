"""Models in GGUF files, written here or those that people have."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from cases import in_turn
from composing import of_command
from gguf import GGMLQuantizationType as Kind
from helpers import LLAMA3_ROPE
from tiny_gguf import write
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

import kangaroo
from kangaroo.cli.schema import select_models
from kangaroo.drafters.draft_model import DraftModelConfig
from kangaroo.heads.adapter_files import adapters_of
from kangaroo.models import embedded, loading
from kangaroo.models.gguf_file import GGUFFile, gguf_path
from kangaroo.models.gguf_models import PACKABLE, read_config, read_model
from kangaroo.models.gguf_tokenizer import read_tokenizer
from kangaroo.models.layer_weights import fingerprint
from kangaroo.models.loading import Dtype, ModelConfig, Weights, load, model_config
from kangaroo.models.packed import PackedLinear, PackedMatrix
from kangaroo.models.quantizing import Quantization
from kangaroo.models.supported import target_hashes
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError, CorruptFile, ModelNotFound, UnsupportedModel

QWEN = os.environ.get("KANGAROO_QWEN_GGUF", "")  # Qwen2.5-Coder-0.5B-Instruct, Q4_K_M
OF_8192 = {"original_max_position_embeddings": 8192}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE | OF_8192}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 128}),
}
STRINGS = [
    "Hello world 12345 1.2e10",
    "  two  spaces\n\n\ttab\r\n \n",
    "naïve café — “quotes” … 你好世界 मानक हिन्दी 🙂👩‍👩‍👧",
    "I'll we've DON'T 'S it's",
    "def f(x):\n        return x**2 # c\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "x" * 50 + " " * 20 + "\n" * 5 + "½²\u200b\u00a0\u3000",
]
KINDS = [((Kind.F32,),), ((Kind.Q4_1, Kind.Q5_0, Kind.F16),), ((Kind.Q8_0,),)]
DAMAGED = [
    (lambda x: x[: len(x) // 2], CorruptFile, "not whole: it has .* bytes"),
    (lambda x: x[:200], CorruptFile, "its header ends too early"),
    (lambda x: b"version https://git-lfs" + x, CorruptFile, "no GGUF file: it begins with"),
    (lambda x: x[:4] + x[4:8][::-1] + x[8:], UnsupportedModel, "other byte order"),
    (lambda x: x[:4] + b"\x01\0\0\0" + x[8:], UnsupportedModel, "GGUF version 1"),
    (lambda x: b"", ModelNotFound, "cannot be read"),
    (lambda x: x.replace(b"attn_norm", b"attn_morn"), CorruptFile, "the weight 'blk.0.attn_n"),
    (lambda x: x.replace(b"llama", b"lamma"), UnsupportedModel, "is a lamma model"),
    (lambda x: x.replace(b"block_count", b"block_const"), CorruptFile, "lacks 'llama.block_count'"),
]


@pytest.mark.parametrize("family, kinds", in_turn(FAMILIES, KINDS), ids=str)
def test_a_file_is_the_model_it_was_written_from(tmp_path, family, kinds):
    architecture, fields = FAMILIES[family]
    source = write(tmp_path / "x.gguf", architecture, kinds, **fields)
    file, ids = GGUFFile(tmp_path / "x.gguf"), torch.arange(40)[None] % 256
    packed = read_model(file, torch.float32, packed=True).eval()
    widened = read_model(file, torch.float32, packed=False).eval()
    with torch.no_grad():
        logits = widened(ids).logits
        assert torch.equal(packed(ids).logits, logits)
        if kinds == (Kind.F32,):
            assert torch.equal(source(ids).logits, logits)
    assert any(isinstance(x, PackedMatrix) for x in packed.modules()) == (kinds != (Kind.F32,))
    assert fingerprint(packed) == fingerprint(widened)
    if architecture == "qwen2":
        source.config.head_dim = None  # as in the hub's
    made, read = target_hashes(source.config), target_hashes(file_config := read_config(file))
    assert made[0] == read[0] and file_config.vocab_size == 259
    options = {"gguf_file": "x.gguf", "quantization_config": GgufConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    if family != "llama3-rope":  # whose factors transformers leaves out
        with torch.no_grad():
            assert torch.equal(theirs.float()(ids).logits, logits)


def test_every_format_that_stays_packed_is_what_gguf_widens(tmp_path):
    """K types have no writer in Python: their blocks are random, with small scales."""
    rng = np.random.default_rng(0)
    for kind in PACKABLE:
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        blocks_OB = rng.integers(0, 60, (6, size * (512 // numbers)), dtype=np.uint8)
        matrix = PackedMatrix(torch.from_numpy(blocks_OB), kind, torch.float32)
        expected = torch.from_numpy(gguf.dequantize(blocks_OB, kind))
        assert matrix.shape == (6, 512) and torch.equal(matrix.widened(), expected)
        assert torch.equal(matrix.widened(torch.tensor([4, 1])), expected[[4, 1]])
        assert matrix.widened(torch.tensor([], dtype=torch.int64)).shape == (0, 512)
        bias, x = torch.nn.Parameter(torch.randn(6)), torch.randn(3, 512)
        linear = PackedLinear(torch.from_numpy(blocks_OB), kind, torch.float32, bias)
        assert torch.equal(linear(x), torch.nn.functional.linear(x, expected, bias))


@pytest.mark.parametrize("weights", Weights)
def test_a_target_from_a_file_writes_the_same_with_any_drafter(tmp_path, weights):
    write(tmp_path / "x.gguf", kinds=(Kind.Q8_0, Kind.Q4_0))
    config = ModelConfig("x", f"{tmp_path}/x.gguf", dtype=Dtype.float32, weights=weights)
    write(tmp_path / "draft.gguf", kinds=(Kind.Q4_0,))  # the same weights, rounded otherwise
    draft_model = DraftModelConfig(model=f"{tmp_path}/draft.gguf")
    models = [kangaroo.load(config, drafter=x) for x in ("vanilla", "hybrid", draft_model)]
    texts = [model.generate(["abcabcabc", "x"], max_new_tokens=24) for model in models]
    assert texts[0] and texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("damage, error, message", DAMAGED)
def test_a_file_that_cannot_be_a_model_says_why_in_one_line(tmp_path, damage, error, message):
    write(tmp_path / "x.gguf")
    whole = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(damage(whole))
    with pytest.raises(error, match=f"x.gguf.*{message}") as raised:
        load(ModelConfig("x", f"{tmp_path}/x.gguf", device="cpu"))
    assert len(str(raised.value).splitlines()) == 1


def test_a_part_of_a_model_and_unknown_types_are_refused(tmp_path, monkeypatch):
    write(tmp_path / "x-00001-of-00002.gguf", metadata={"split.count": 2})
    with pytest.raises(UnsupportedModel, match=r"one of 2 parts.*llama-gguf-split --merge"):
        GGUFFile(tmp_path / "x-00001-of-00002.gguf")
    write(tmp_path / "x.gguf")
    content = (tmp_path / "x.gguf").read_bytes()
    place = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    changed = content[:place] + b"\xe7\x03\0\0" + content[place + 4 :]
    (tmp_path / "x.gguf").write_bytes(changed)
    with pytest.raises(UnsupportedModel, match=r"blk.0.attn_q.weight of type 999"):
        GGUFFile(tmp_path / "x.gguf")


def test_a_file_on_the_hub_is_named_by_its_owner_and_offline_one_line_says_so():
    config = model_config("hf://Owner/Name/folder/some-Q4_K_M.gguf")
    assert config.name == "some-Q4_K_M"
    with pytest.raises(ModelNotFound, match=r"'hf://Owner/Name/folder/some-Q4_K_M.gguf' is not in"):
        gguf_path(config.path)
    with pytest.raises(ModelNotFound, match=r"write hf://OWNER/NAME/FILE.gguf"):
        gguf_path("hf://Owner/file.gguf")


def test_weights_that_a_model_cannot_have_are_refused_before_it_is_loaded():
    with pytest.raises(ConfigError, match=r"weights=packed is for GGUF files; for 'some/model'"):
        ModelConfig("x", "some/model", weights=Weights.packed)
    with pytest.raises(ConfigError, match=r"leave out model\.quantization=int8"):
        ModelConfig("x", "x.gguf", weights=Weights.packed, quantization=Quantization.int8)


def test_a_file_that_another_replaces_stays_as_it_was(tmp_path):
    write(tmp_path / "x.gguf")
    model = read_model(GGUFFile(tmp_path / "x.gguf"), torch.float32, packed=True).eval()
    write(tmp_path / "y.gguf", seed=1)
    ids = torch.arange(9)[None]
    before = model(ids).logits
    os.replace(tmp_path / "y.gguf", tmp_path / "x.gguf")
    assert torch.equal(model(ids).logits, before)


@pytest.fixture(scope="module")
def smollm2_file():
    """SmolLM2's own Q4_1 file, and the folder that it is widened to."""
    try:
        folder = embedded.embedded_checkpoint()
        return embedded.embedded_gguf(), folder
    except ModelNotFound as error:
        pytest.skip(str(error))


def same_ids(tokenizer, other):
    for text in STRINGS:
        assert tokenizer.encode(text) == other.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    turns = [{"role": "user", "content": "hi"}]
    texts = [x.apply_chat_template(turns, tokenize=False) for x in (tokenizer, other)]
    assert texts[0] == texts[1] and tokenizer.special_tokens_map == other.special_tokens_map


def test_smollm2s_own_file_is_the_embedded_model_with_its_tokenizer(smollm2_file):
    path, folder = smollm2_file
    file = GGUFFile(path)
    same_ids(read_tokenizer(file), AutoTokenizer.from_pretrained(folder))
    theirs, ours = AutoConfig.from_pretrained(folder), read_config(file)
    assert target_hashes(theirs) == target_hashes(ours)
    model = read_model(file, torch.bfloat16, packed=True)
    assert model.generation_config.eos_token_id == [2]
    assert fingerprint(model) == "40a1738f2c80b692"  # what the shipped adapters were trained for


def test_smollm2s_adapters_serve_its_file_and_its_folder(smollm2_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in map(str, smollm2_file):
        assert adapters_of(path, Path(path).stem) == "smollm2-135m"
        typed = select_models([f"model={path}", "drafter=kangaroo"])
        assert of_command("evaluate", typed).drafter.adapter == "adapters/smollm2-135m"
    config = loading.shape_of(ModelConfig("x", str(smollm2_file[1])))
    config.tie_word_embeddings = False
    config.rms_norm_eps = 1e-5  # as in the hub's config
    assert target_hashes(config)[0] == target_hashes(read_config(GGUFFile(smollm2_file[0])))[0]


@pytest.mark.slow
@pytest.mark.skipif(not Path(QWEN).is_file(), reason="KANGAROO_QWEN_GGUF names no file")
def test_qwens_file_is_what_transformers_widens():
    file = GGUFFile(Path(QWEN))
    folder, name = os.path.split(QWEN)
    same_ids(read_tokenizer(file), AutoTokenizer.from_pretrained(folder, gguf_file=name))
    ids = torch.tensor([read_tokenizer(file).encode("def add(a, b):")])
    with torch.no_grad():
        logits = [read_model(file, torch.bfloat16, x).eval()(ids).logits for x in (True, False)]
        assert torch.equal(*logits)
        options = {"gguf_file": name, "dtype": torch.bfloat16}
        options["quantization_config"] = GgufConfig(dequantize=True)
        theirs = AutoModelForCausalLM.from_pretrained(folder, **options)
        assert torch.equal(theirs(ids).logits, logits[0])
    assert TargetModel(theirs).fingerprint == fingerprint(read_model(file, torch.bfloat16, True))
