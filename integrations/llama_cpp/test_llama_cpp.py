"""llama.cpp beside us: its file holds our weights, its process disturbs nobody."""

import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests")]
import gguf_file as files
from bench import against_vanilla
from gguf_file import gguf_file
from helpers import LLAMA3_ROPE, random_prompts, tiny, vanilla_texts
from server import ask, server

from kangaroo.engine.requests import Generation, StepRecord
from kangaroo.utils.errors import MissingPackage, ProcessLost, UnsupportedModel

NEW = 40
LLAMA3 = LLAMA3_ROPE | {"rope_theta": 10000.0}  # by its base a text has nearly equal candidates
needs_llama = pytest.mark.skipif(
    files.find_spec("xllamacpp") is None, reason="needs the extra benchmark (xllamacpp)"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KANGAROO_CACHE", str(tmp_path))


def servers():
    return [p for p in psutil.Process().children() if "process.py" in " ".join(p.cmdline())]


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
            answer = ask(address, prompt, NEW)
            assert answer.tokens == text[len(prompt) :]
            assert [len(step.tokens) for step in answer.steps] == [1] * NEW
            assert 0 < answer.prefill_seconds < answer.seconds


@needs_llama
def test_the_same_bfloat16_weights_are_written_once_as_they_are_and_others_to_another_file():
    from gguf import GGMLQuantizationType, GGUFReader

    lm = tiny(dtype=torch.bfloat16)
    file = gguf_file(lm)
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    down = tensors["blk.1.ffn_down.weight"]
    assert down.tensor_type == GGMLQuantizationType.BF16
    weight = lm.hf.state_dict()["model.layers.1.mlp.down_proj.weight"]
    assert down.data.tobytes() == weight.view(torch.uint8).numpy().tobytes()
    assert len(tensors) == len(lm.hf.state_dict())
    written = file.stat().st_mtime_ns
    assert gguf_file(lm) == file and file.stat().st_mtime_ns == written
    lm.head.weight[0, 0] += 1
    assert gguf_file(lm) != file
    assert {each.suffix for each in file.parent.iterdir()} == {".gguf"}


@needs_llama
def test_an_idle_server_takes_no_time_of_a_core_has_our_threads_and_ends_with_the_block():
    with server(gguf_file(tiny()), 64) as address:
        (process,) = servers()
        assert process.cmdline()[-2:] == [str(torch.get_num_threads()), "64"]
        ask(address, [1, 2, 3], 16)
        time.sleep(0.2)
        before = process.cpu_times()
        time.sleep(1)
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system <= 0.02
    assert not servers()


@needs_llama
def test_a_server_that_is_gone_or_refuses_or_cannot_load_is_an_error(tmp_path):
    with server(gguf_file(tiny()), 64) as address, pytest.raises(ProcessLost, match="exceed"):
        ask(address, [1] * 999, 8)
    with pytest.raises(ProcessLost, match="has ended"):
        ask(address, [1, 2, 3], 8)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, or not")
    with (
        pytest.raises(ProcessLost, match=r"llama.cpp could not load '.*broken.gguf': .+"),
        server(tmp_path / "broken.gguf", 64),
    ):
        pass
    with pytest.raises(ProcessLost, match="could not load"), server(tmp_path, 64, "false"):
        pass


def test_without_the_extra_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"pip install .*\[benchmark\]"):
        gguf_file(tiny())


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"rope_parameters": LLAMA3 | {"rope_type": "yarn"}}, "RoPE is 'yarn'"),
        ({"architecture": "qwen2"}, "it is a qwen2 model"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(overrides, named):
    with pytest.raises(UnsupportedModel, match=named):
        files.check_convertible(tiny(**overrides))


def test_the_speedup_is_the_ratio_of_total_seconds_for_as_many_tokens_of_each_prompt():
    def text(seconds=1.0, rounds=4, tokens=()):
        steps = [StepRecord([0], host_seconds=seconds / rounds) for _ in range(rounds)]
        return Generation(list(tokens), [StepRecord([0]), *steps])

    loads = 1.0, 10.0, 1.0  # the machine is slow for a while
    seconds = (8.0, 4.0), (16.0, 4.0), (12.0, 12.0)
    vanilla = [[text(load * theirs) for load in loads] for theirs, _ in seconds]
    # half as many tokens
    method = [[text(load * ours / 2, rounds=2) for load in loads] for _, ours in seconds]
    result = against_vanilla(vanilla, method)
    assert result["speedup"] == pytest.approx(36 / 20)
    assert 1.0 <= result["speedup_ci95"][0] < 36 / 20 < result["speedup_ci95"][1] <= 4.0
    texts = [[text(tokens=[5, 9])], [text(tokens=[7, 7])]]
    assert against_vanilla(texts, [texts[0], [text(tokens=[7, 8])]])["equal_texts"] == 1
