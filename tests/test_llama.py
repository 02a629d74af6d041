"""llama.cpp as a rival: its file holds our weights, its process disturbs nobody."""

import json
import time
from contextlib import ExitStack

import psutil
import pytest
import torch
from helpers import random_prompts, tiny, vanilla_texts

from kangaroo.evaluation.speed import llama, llama_file
from kangaroo.evaluation.speed.llama import ask, llama_rivals, rounds, server
from kangaroo.evaluation.speed.llama_file import gguf_file
from kangaroo.utils.errors import MissingPackage, ProcessLost, UnsupportedModel

NEW = 40
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
needs_llama = pytest.mark.skipif(
    llama_file.find_spec("xllamacpp") is None, reason="needs the extra benchmark (xllamacpp)"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KANGAROO_CACHE", str(tmp_path))


def servers():
    return [p for p in psutil.Process().children() if "llama_process" in " ".join(p.cmdline())]


@needs_llama
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 4},
        {"rope_parameters": LLAMA3},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=["grouped heads", "tied", "scaled RoPE", "biases"],
)
def test_llama_cpp_writes_vanillas_text_from_our_weights(overrides):
    lm = tiny(**overrides)
    prompts = random_prompts(12, 33)
    with server(gguf_file(lm), 128) as address:
        for prompt, text in zip(prompts, vanilla_texts(lm, prompts, NEW), strict=True):
            trial = ask(address, prompt, NEW)
            assert trial.tokens == text[len(prompt) :]
            assert trial.prompt_tokens == len(prompt)
            assert trial.rounds == [(1, 0)] * (NEW - 1)
            assert trial.first_seconds > 0 and trial.decode_seconds > 0


@needs_llama
def test_bfloat16_weights_are_kept_as_they_are():
    from gguf import GGMLQuantizationType, GGUFReader

    lm = tiny(dtype=torch.bfloat16)
    found = {tensor.name: tensor for tensor in GGUFReader(gguf_file(lm)).tensors}
    down = found["blk.1.ffn_down.weight"]
    assert down.tensor_type == GGMLQuantizationType.BF16
    own = lm.hf.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert down.data.tobytes() == own.view(torch.uint8).numpy().tobytes()
    assert len(found) == len(lm.hf.state_dict())


@needs_llama
def test_its_speculation_writes_the_same_text_in_fewer_rounds():
    lm = tiny()
    prompt = random_prompts(6)[0] * 8
    (text,) = vanilla_texts(lm, [prompt], NEW)
    with server(gguf_file(lm), 128, ngram=2, draft=4) as address:
        trial = ask(address, prompt, NEW)
    assert trial.tokens == text[len(prompt) :]
    assert trial.decoded == NEW - 1 > len(trial.rounds)
    assert trial.drafted > 0 and all(drafted <= 4 for _, drafted in trial.rounds)


def test_rounds_are_told_apart_by_what_was_drafted_and_accepted():
    def chunk(drafted=None, accepted=None):
        told = {} if drafted is None else {"draft_n": drafted, "draft_n_accepted": accepted}
        return {"timings": told}

    first, plain = chunk(), chunk()
    two_of_four = [chunk(4, 2)] * 3
    none_of_four, after = chunk(8, 2), chunk(8, 2)
    chunks = [first, plain, *two_of_four, none_of_four, after, *[chunk(12, 6)] * 2]
    assert rounds(chunks) == [(1, 0), (3, 4), (1, 4), (1, 0), (2, 4)]  # the limit cut the last


@needs_llama
def test_an_idle_server_takes_no_time_of_a_core_and_ends_with_the_block():
    lm = tiny()
    with server(gguf_file(lm), 64) as address:
        (process,) = servers()
        ask(address, [1, 2, 3], 16)
        time.sleep(0.2)
        before = process.cpu_times()
        time.sleep(1)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system <= 0.02
    assert not servers()


@needs_llama
def test_the_same_weights_are_written_once_and_others_to_another_file():
    lm = tiny()
    file = gguf_file(lm)
    written = file.stat().st_mtime_ns
    assert gguf_file(tiny()) == file and file.stat().st_mtime_ns == written
    lm.head.weight[0, 0] += 1
    assert gguf_file(lm) != file
    assert {one.suffix for one in file.parent.iterdir()} == {".gguf"}


@needs_llama
def test_every_rival_that_a_model_cannot_have_is_named_with_the_reason():
    with ExitStack() as processes:
        found, skipped = llama_rivals(tiny(), 64, processes)
        assert list(found) == ["llama_f32", "llama_ngram"]
        assert "is not the embedded model" in skipped["llama_q4_1"]
        assert len(servers()) == 2
    assert not servers()
    with ExitStack() as processes:
        found, skipped = llama_rivals(tiny("qwen2"), 64, processes)
    assert not found and "it is a qwen2 model" in skipped["llama_f32"]


def test_without_the_extra_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setattr(llama_file, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install .*\[benchmark\]"):
        gguf_file(tiny())
    with ExitStack() as processes:
        found, skipped = llama_rivals(tiny(), 64, processes)
    assert not found and list(skipped) == ["llama_f32", "llama_ngram", "llama_q4_1"]
    assert all("[benchmark]" in why for why in skipped.values())


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"rope_parameters": LLAMA3 | {"rope_type": "yarn"}}, "RoPE is 'yarn'"),
        ({"dtype": torch.float64}, "weights are torch.float64"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(overrides, named):
    with pytest.raises(UnsupportedModel, match=named):
        llama_file.check_convertible(tiny(**overrides))


@needs_llama
def test_a_file_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, or not")
    with (
        pytest.raises(ProcessLost, match=r"llama.cpp could not load '.*broken.gguf': .+"),
        server(tmp_path / "broken.gguf", 64),
    ):
        pass


@needs_llama
def test_a_server_that_is_gone_or_refuses_is_an_error():
    with server(gguf_file(tiny()), 64) as address, pytest.raises(ProcessLost, match="exceed"):
        ask(address, [1] * 999, 8)
    with pytest.raises(ProcessLost, match="has ended"):
        ask(address, [1, 2, 3], 8)


@needs_llama
def test_the_settings_are_those_of_the_process(monkeypatch):
    """It has as many threads as we have."""
    told = []
    popen = llama.subprocess.Popen

    def noted(command, **options):
        told.append(json.loads(command[-1]))
        return popen(command, **options)

    monkeypatch.setattr(llama.subprocess, "Popen", noted)
    with server(gguf_file(tiny()), 64):
        pass
    assert told[0]["threads"] == torch.get_num_threads()
