"""An adapter is as small as the paper says, follows its target, and is refused by any other."""

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from helpers import EXIT, adapter_for, eagle3_for, eagle_for, recipe_of, saved_adapter, tiny
from safetensors.torch import load_file, save_file

from kangaroo.drafters.eagle import EagleConfig
from kangaroo.drafters.eagle3 import Eagle3Config
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.medusa import MedusaConfig
from kangaroo.heads import adapter_files as files
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.adapter_files import CONFIG, VOCABULARY, WEIGHTS, find, load, read_config
from kangaroo.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from kangaroo.models.target import TargetModel
from kangaroo.training.recipe import trainees
from kangaroo.utils.errors import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile
from kangaroo.utils.folders import project_folder

TRAINED = {KangarooConfig: adapter_for, EagleConfig: eagle_for, Eagle3Config: eagle3_for}
TRAINED[MedusaConfig] = lambda lm: MedusaHeads(lm, MedusaHeadsConfig())
OTHERS = [{"num_hidden_layers": 5}, {"num_key_value_heads": 4}, {"architecture": "mistral"}]
OTHERS += [{"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
BROKEN = [
    *((name, None, AdapterNotFound, name) for name in (WEIGHTS, CONFIG)),
    *((WEIGHTS, length, CorruptFile, "") for length in (0, -1)),
    *((CONFIG, text, CorruptFile, "") for text in (b"{", b"[1]", b"\xff\xfe\x00")),
    (CONFIG, b'{"target": "x", "surprise": 1}', CorruptFile, ""),
    (CONFIG, b'{"architecture": {"kind": "os"}}', CorruptFile, "its kind is os, not one of ada"),
]


@pytest.fixture
def saved(lm, tmp_path):
    return saved_adapter(lm, adapter_for(lm), tmp_path, (7, 3, 60), {"steps": 3})


def test_what_was_saved_is_what_is_loaded(lm, saved):
    adapter, _ = load(str(saved), lm, Adapter)
    config, original = read_config(str(saved)), adapter_for(lm)
    assert config == files.describe(lm, original, training={"steps": 3})
    assert (config.target, config.exit_layer, config.n_layers) == ("tiny/llama", EXIT, 4)
    assert config.parameters == sum(parameter.numel() for parameter in original.parameters())
    assert adapter.exit_layer == EXIT and not adapter.training
    assert not any(parameter.requires_grad for parameter in adapter.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_trained_adapter_is_kept_in_its_targets_dtype_and_loaded_as_frozen(tmp_path, dtype):
    lm = tiny(dtype=dtype)
    (trainee,) = trainees(lm, [recipe_of(name="a", exit_layers=[EXIT])], None)
    for parameter in trainee.adapter.parameters():  # in float32, as training leaves them
        parameter.data += 1e-3 * torch.randn_like(parameter)
    about = files.describe(lm, trainee.adapter, training={})
    kept = files.saved_dtype(trainee.adapter, lm)
    folder = files.save(trainee.adapter, about, None, tmp_path, kept)
    loaded, _ = load(str(folder), lm, Adapter)
    for name, tensor in load_file(folder / WEIGHTS).items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, trainee.adapter.state_dict()[name].to(dtype))
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_a_weight_beyond_float16_is_kept_in_bfloat16():
    lm = tiny(dtype=torch.float16)
    adapter = Adapter(lm, EXIT).start_from(lm).float()
    for weight, kept in ((-65504.0, torch.float16), (-65536.0, torch.bfloat16)):
        adapter.norm.weight.data[3] = weight
        assert files.saved_dtype(adapter, lm) == kept


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_an_untrained_adapters_logits_are_three_tenths_of_its_targets(architecture):
    """Of equal states; Gemma's norms multiply by one and their weight."""
    lm, x_12D = tiny(architecture), torch.randn(1, 2, 32)
    norm = Adapter(lm, EXIT).start_from(lm).norm
    torch.testing.assert_close(lm.head(norm(x_12D)), 0.3 * lm.head(lm.norm(x_12D)))


def test_a_missing_adapter_is_the_one_that_training_saved(lm, saved, tmp_path, monkeypatch, caplog):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(AdapterNotFound, match=r"train\.py .* model\.name=mine\).*convert\.py imp"):
        load("adapters/mine", lm, Adapter)
    with pytest.raises(AdapterNotFound, match=r"train\.py model=FOLDER .* adapter=medusa"):
        load("adapters/mine-medusa", lm, MedusaHeads)
    left = Path("outputs/train/mine/attention-exit2")
    shutil.copytree(saved, left, ignore=shutil.ignore_patterns("elsewhere"))  # `saved` is above
    (left.parent / "half-saved").mkdir()
    with caplog.at_level("INFO"):
        load("adapters/mine", lm, Adapter)
    assert f"'adapters/mine' is that in {left}" in caplog.text
    saved_adapter(lm, MedusaHeads(lm, MedusaHeadsConfig()), left.parent / "medusa")
    assert find("adapters/mine") == left  # heads are no adapter
    assert find("adapters/mine-medusa") == left.parent / "medusa"
    shutil.copytree(left, left.parent / "layer-exit2")
    with pytest.raises(AdapterNotFound, match=r"several: .*attention-exit2, .*layer-exit2.*Pass"):
        load("adapters/mine", lm, Adapter)
    shutil.copytree(left, "adapters/mine")
    with caplog.at_level("INFO"):
        assert find("adapters/mine") == Path("adapters/mine")
    message = f"'adapters/mine' drafts; drafter.adapter= takes what was trained here: {left}"
    assert message in caplog.text


@pytest.mark.parametrize("name", ["smollm2-135m-fused", "qwen2.5-coder-0.5b"])
def test_what_is_shipped_is_found_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = f"adapters/{name.removesuffix('-fused')}-fused"  # by the default drafter
    assert find(asked) == project_folder("adapters") / name


def test_an_adapter_that_is_nowhere_names_what_was_tried(lm, saved, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for path in ("nobody/nothing-here", str(saved / "no-such-folder"), str(saved / CONFIG)):
        with pytest.raises(AdapterNotFound, match=f"'{path}'.*Pass drafter.adapter="):
            load(path, lm, Adapter)


@pytest.mark.parametrize("config", TRAINED)
def test_heads_and_adapters_are_not_taken_for_each_other(config, lm, tmp_path):
    adapter = TRAINED[config](lm)
    folder = str(saved_adapter(lm, adapter, tmp_path))
    for other in TRAINED.keys() - {config}:
        with pytest.raises(AdapterMismatch, match=f"drafter={adapter.architecture.drafter}"):
            other(adapter=folder).build(lm)
    if config is not MedusaConfig:  # whose guesses were not counted
        assert type(config(adapter=folder).build(lm).adapter) is type(adapter)


@pytest.mark.parametrize("name", ["attention_window", "vocabulary_beside_texts"])
@pytest.mark.parametrize("count", [-1, True])
def test_a_fact_that_is_no_count_is_a_broken_file(saved, name, count):
    fields = json.loads((saved / CONFIG).read_text())
    (saved / CONFIG).write_text(json.dumps(fields | {"facts": {name: count}}))
    with pytest.raises(CorruptFile, match=f"{saved}.*its {name} is {count!r}"):
        read_config(str(saved))


@pytest.mark.parametrize("name, content, error, message", BROKEN)
def test_a_folder_that_holds_no_whole_adapter_says_why(lm, saved, name, content, error, message):
    """Without a file, with so many bytes of it, or with others."""
    file = saved / name
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(whole[:content] if isinstance(content, int) else content)
    with pytest.raises(error, match=f"{saved}.*{message}"):
        load(str(saved), lm, Adapter)


@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_an_adapter_for_another_target_is_refused_and_both_are_named(saved, fields):
    other = tiny(**fields)
    other.config.name_or_path = "some/other"
    named = rf"tiny/llama \(exit layer {EXIT} of 4 layers.*some/other \({other.n_layers} layers"
    with pytest.raises(AdapterMismatch, match=named):
        load(str(saved), other, Adapter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_adapter_on_other_weights_of_the_same_shape_is_warned_of(saved, caplog, dtype):
    other = TargetModel(tiny(dtype=torch.bfloat16).hf.to(dtype))
    load(str(saved), other, Adapter)
    assert not caplog.messages  # the same weights, under another name and in any number format
    del other.fingerprint
    other.layers[3].mlp.down_proj.weight.data *= 1.01
    other.config.name_or_path = "somebody/fine-tuned"
    load(str(saved), other, Adapter)
    (text,) = caplog.messages
    assert "was trained for tiny/llama (weights " in text and "is somebody/fine-tuned (weig" in text


def test_every_weight_is_needed_finite_and_none_is_ignored(lm, saved):
    state = load_file(saved / WEIGHTS)
    missing = {name: tensor for name, tensor in state.items() if name != "norm.weight"}
    infinite = {"norm.weight": torch.full((32,), torch.inf)}
    for other, error, message in (
        (missing, AdapterMismatch, r"norm\.weight"),
        (state | {"lm_head.weight": torch.zeros(2, 2)}, AdapterMismatch, r"lm_head\.weight"),
        (state | {"norm.weight": torch.zeros(5)}, AdapterMismatch, r"norm\.weight"),
        (state | infinite, CorruptFile, f"{saved}.*norm.weight holds numbers that are not finite"),
    ):
        save_file(other, saved / WEIGHTS)
        with pytest.raises(error, match=message):
            load(str(saved), lm, Adapter)


def test_a_draft_vocabulary_is_the_most_frequent_tokens(saved):
    draft_vocabulary = files.draft_vocabulary
    assert draft_vocabulary(str(saved), 2).tolist() == [3, 7]
    for size in (-1, 4):
        with pytest.raises(ConfigError, match=f"vocabulary={size} must lie in 1 to 3"):
            draft_vocabulary(str(saved), size)
    (saved / VOCABULARY).write_bytes((saved / VOCABULARY).read_bytes()[:20])
    with pytest.raises(CorruptFile, match=VOCABULARY):
        draft_vocabulary(str(saved), 2)
    (saved / VOCABULARY).unlink()
    with pytest.raises(AdapterNotFound, match=r"vocabulary\.safetensors.*Leave it unset"):
        draft_vocabulary(str(saved), 2)


def test_the_adapter_says_how_much_to_draft_from_unless_the_drafter_does(lm, tmp_path):
    folder = str(saved_adapter(lm, adapter_for(lm), tmp_path, (7, 3, 60), vocabulary=2))
    assert KangarooConfig(adapter=folder).build(lm).head.vocabulary_K.tolist() == [3, 7]
    assert KangarooConfig(adapter=folder, vocabulary=1).build(lm).head.vocabulary_K.tolist() == [7]
    assert KangarooConfig(adapter=folder, vocabulary=0).build(lm).head.vocabulary_K is None
    about = {"vocabulary": 2, "facts": {"vocabulary_beside_texts": 1}}
    fewer = saved_adapter(lm, adapter_for(lm), tmp_path / "fewer", (7, 3, 60), **about)
    for options, tokens in ({}, [7]), ({"text_vocabulary": 0}, [3, 7]), ({"vocabulary": 2}, [3, 7]):
        drafter = KangarooConfig(adapter=str(fewer), **options).build(lm)
        assert drafter.head.vocabulary_K.tolist() == tokens


def test_what_an_adapter_took_to_make_is_told_from_its_file(lm, saved, tmp_path):
    for path in (str(saved), "untrained:2"):  # the file does not say
        assert KangarooConfig(adapter=path).made_by() == {}
    training = {"progress": {"assistant_tokens": 1200}, "trainer": {"epochs": 2}}
    training["adapter"] = {"start": "adapters/other"}
    folder = saved_adapter(lm, adapter_for(lm), tmp_path / "told", training=training)
    facts = {"trained_positions": 1200, "epochs": 2, "start": "adapters/other"}
    assert KangarooConfig(adapter=str(folder)).made_by() == facts
