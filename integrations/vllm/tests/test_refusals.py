"""What cannot be run is refused by name, with what to do instead."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import kangaroo_vllm
import pytest
from folders import save_model
from kangaroo_vllm import checks
from kangaroo_vllm.checks import Unsupported
from vllm.config import CUDAGraphMode

from kangaroo.models.loading import random_model


@pytest.fixture
def refused(serve, folders, tmp_path):
    """The words in which a folder with this in its `kangaroo` section is refused."""

    def words(drafter="attention", **options):
        with pytest.raises(Unsupported) as error, serve(drafter, **options):
            pass
        return str(error.value)

    def changed(**changes):
        folder = shutil.copytree(folders["attention"], tmp_path / "changed")
        config = json.loads((folder / "config.json").read_text())
        config["kangaroo"] |= changes
        (folder / "config.json").write_text(json.dumps(config))
        folders["changed"] = folder
        return words("changed")

    words.changed = changed
    return words


@pytest.mark.parametrize(
    "parts, named",
    [
        ({"kind": "adapter", "attention": True, "fused": True}, "fused"),
        ({"kind": "adapter", "attention": False, "fused": False}, "without attention"),
        (
            {"kind": "adapter", "attention": True, "attention_layers": 2, "fused": False},
            "of 2 attention layers",
        ),
        ({"kind": "medusa_heads"}, "medusa_heads"),
    ],
)
def test_other_kinds_of_adapter_are_named(parts, named, refused):
    said = refused.changed(architecture=parts)
    assert f"this adapter is {named}," in said and "adapter=attention" in said


def test_another_format_is_named(refused):
    said = refused.changed(format=2)
    assert "no 'kangaroo' of format 1" in said and "scripts/convert.py export to=vllm" in said


def test_another_target_is_named(serve, folders, tmp_path, refused):
    assert "6 layers, not 7" in refused.changed(target_layers=7)
    other = random_model(
        vocab_size=128,
        hidden_size=64,
        head_dim=32,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    folders["other"] = save_model(other, tmp_path / "other")
    said = refused("attention", target="other")
    assert "hidden_size 64, not 128" in said and "num_attention_heads 2, not 4" in said


def test_a_threshold_that_is_none_is_named(refused):
    for value in (1.0, -0.1, "0.5", True):
        assert f"not {value!r}" in refused(threshold=value)


def test_lora_is_named(refused):
    assert "does not run with LoRA" in refused("attention", enable_lora=True)


@pytest.mark.parametrize(
    "section, field, value, named",
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config", "data_parallel_size", 2, "data parallelism"),
        ("", "quant_config", object(), "a quantized target"),
        ("", "kv_transfer_config", object(), "--kv-transfer-config"),
        ("model_config", "enable_prompt_embeds", True, "--enable-prompt-embeds"),
        ("compilation_config", "cudagraph_mode", CUDAGraphMode.FULL, "--enforce-eager"),
    ],
)
def test_options_that_were_not_tried_are_named(section, field, value, named):
    one = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
    config = SimpleNamespace(
        parallel_config=one,
        lora_config=None,
        quant_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(enable_prompt_embeds=False),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
    )
    checks.check_options(config)
    setattr(getattr(config, section) if section else config, field, value)
    with pytest.raises(Unsupported, match=named):
        checks.check_options(config)


def test_the_other_model_runner_is_named():
    checks.check_runner(SimpleNamespace(use_v2_model_runner=False))
    with pytest.raises(Unsupported, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        checks.check_runner(SimpleNamespace(use_v2_model_runner=True))


def test_asynchronous_scheduling_needs_drafts_of_one_length():
    scheduling = SimpleNamespace(async_scheduling=True)
    config = SimpleNamespace(additional_config=None, scheduler_config=scheduling)
    adapter = checks.Adapter(2, 6, False, False, None, 0.6)
    with pytest.raises(Unsupported, match="--no-async-scheduling"):
        checks.threshold(adapter, config)
    config.additional_config = {"kangaroo_threshold": 0}
    assert checks.threshold(adapter, config) == 0


def test_another_vllm_is_named_when_the_adapter_loads_and_not_before(
    serve, folders, tmp_path, monkeypatch
):
    # a new folder: vLLM keeps in mind which class belongs to one that it knows
    folders["new"] = shutil.copytree(folders["attention"], tmp_path / "new")
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    kangaroo_vllm.register()
    try:
        with serve(threshold=None):
            pass
        with (
            pytest.raises(Unsupported, match=r"tested with vLLM 0\.32\.0, and this is vLLM 0\.33"),
            serve("new", threshold=None),
        ):
            pass
    finally:
        monkeypatch.undo()
        kangaroo_vllm.register()
