"""What cannot be run is refused by name, with what to do instead."""

import ast
import json
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from folders import save_model, tiny
from kangaroo_vllm import checks, touched
from kangaroo_vllm.checks import Unsupported
from vllm.config import CUDAGraphMode


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
    assert "4 layers, not 7" in refused.changed(target_layers=7)
    other = tiny(hidden_size=64, num_attention_heads=2).hf
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
        ("", "kv_transfer_config", object(), "--kv-transfer-config"),
        ("model_config", "enable_prompt_embeds", True, "--enable-prompt-embeds"),
        ("speculative_config", "draft_sample_method", "probabilistic", "sampled drafts"),
        ("compilation_config", "cudagraph_mode", CUDAGraphMode.FULL, "PIECEWISE"),
        ("", "additional_config", {}, "which adapter is to draft?"),
        ("", "additional_config", {"kangaroo": "folder", "kangaroo_max_batch": 1.5}, "max_batch"),
        ("", "additional_config", {"kangaroo": "x", "kangaroo_text_vocabulary": "9"}, "from 0, no"),
    ],
)
def test_options_that_were_not_tried_are_named(section, field, value, named):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        lora_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(enable_prompt_embeds=False),
        speculative_config=SimpleNamespace(draft_sample_method="greedy"),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
        additional_config={"kangaroo": "folder"},
    )
    checks.options(config)
    setattr(getattr(config, section) if section else config, field, value)
    with pytest.raises(Unsupported, match=named):
        checks.options(config)


@pytest.mark.parametrize("own_head, vocabulary", [(False, None), (True, None), (True, 64)])
def test_tokens_of_texts_are_refused_where_they_bring_nothing(own_head, vocabulary):
    rooms = [checks.Options("folder", None, 8, wanted).room for wanted in (None, 0, 64)]
    facts = checks.AdapterFacts(2, 6, False, own_head, vocabulary, 0.6)
    assert [room(facts) for room in rooms[:2]] == [0, 0]
    with pytest.raises(Unsupported, match="kangaroo_text_vocabulary is for adapters that draft by"):
        rooms[2](facts)
    by_some_rows = checks.AdapterFacts(2, 6, False, False, 64, 0.6)
    assert [room(by_some_rows) for room in rooms] == [checks.ROOM, 0, 64]


@pytest.mark.parametrize("version, warned", [(touched.TESTED[0], 0), ("0.99.0", 1)])
def test_another_vllm_that_is_as_it_was_warns(version, warned, monkeypatch):
    said = []
    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setattr(logging.getLogger("vllm"), "warning", lambda *words: said.append(words))
    touched.check()
    assert len(said) == warned and all("0.99.0" in words for words in said)


def changed_forward(self, positions, hidden_states, residual):
    return hidden_states + residual, residual


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("forward_context.set_forward_context", lambda attn_metadata: 0, "takes no batch_des"),
        ("forward_context.get_forward_context", lambda step: 0, "get_forward_context needs step"),
        ("compilation.backends.set_model_tag", None, "set_model_tag is not there"),
        ("model_executor.models.llama.LlamaDecoderLayer.forward", changed_forward, "Layer.forward"),
    ],
)
def test_a_vllm_in_which_something_has_changed_is_refused(name, value, told, monkeypatch):
    if value is None:
        monkeypatch.delattr(f"vllm.{name}")
    else:
        monkeypatch.setattr(f"vllm.{name}", value)
    with pytest.raises(Unsupported, match=rf"where this has changed: vllm\.[^;]*{told}"):
        touched.check()


def test_what_is_touched_is_all_that_is_imported():
    """Of vLLM, in the code of this package."""
    names = set()
    for path in Path(touched.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                names |= {f"{node.module}:{x.name}" for x in node.names}
    listed = set(re.findall(r"vllm[\w.]*:\w+", touched.CALLED + " ".join(touched.CODE)))
    assert names - listed == {
        "vllm.config:VllmConfig",
        "vllm.triton_utils:HAS_TRITON",
        "vllm.v1.sample:rejection_sampler",
    }
