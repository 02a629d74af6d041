"""What a training takes is said and refused by the devices found, before anything is loaded."""

import json
from dataclasses import replace

import psutil
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kangaroo import cli
from kangaroo.data import store
from kangaroo.estimate import fit
from kangaroo.estimate.devices import Device, Devices, found
from kangaroo.estimate.fit import Writing, check_training, foresee
from kangaroo.models.loading import ModelConfig
from kangaroo.models.meta_model import blueprint
from kangaroo.utils.errors import ConfigError, DataError

GB = 10**9
A100 = "NVIDIA A100-SXM4-80GB"


class Gpus:
    """A machine's GPUs by name and free bytes; asked for any other, it fails."""

    def __init__(self, monkeypatch, *gpus, current=0):
        self.gpus, self.current = gpus, current
        for name in (
            "is_available",
            "device_count",
            "current_device",
            "mem_get_info",
            "get_device_name",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def is_available(self):
        return bool(self.gpus)

    def device_count(self):
        return len(self.gpus)

    def current_device(self):
        assert self.gpus
        return self.current

    def mem_get_info(self, device):
        assert device in range(len(self.gpus)), f"there is no GPU {device}"
        return self.gpus[device][1], 80 * GB  # all of it may be more than is free

    def get_device_name(self, device=None):
        device = self.current if device is None else device
        assert device in range(len(self.gpus)), f"there is no GPU {device}"
        return self.gpus[device][0]


def memory(monkeypatch, available):
    """A machine with so much memory left, of which the CPU alone may be asked."""
    system = type("memory", (), {"available": available})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: system)


def composed(*overrides):
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        return OmegaConf.to_object(compose("train", ["output=out", *overrides]))


def foreseen(*overrides, processes=1):
    config = composed(*overrides)
    recipes = [config.adapter, *config.more.values()]
    return foresee(
        blueprint(config.model), recipes, config.model, config.data, config.trainer, processes
    )


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_papers_training_fits_a_gpu_and_its_time_follows_from_the_peak(monkeypatch):
    Gpus(monkeypatch, (A100, 80 * GB))
    devices, expected, lines = foreseen("model=vicuna-7b")
    assert (devices.free, devices.kind) == (80 * GB, Device.a100)
    assert lines[0] == f"on 1 x {A100}, 80.0 GB free for each"
    assert lines[1].startswith(expected.summary()) and "(assumed)" in lines[1]
    hours = sum(expected.flops.values()) / (0.4 * 312e12) / 3600
    assert f"about {hours:.2g} hours of training, {hours / 10:.2g} an epoch" in lines[2]
    assert "312 TFLOP/s (by its data sheet)" in lines[2]
    assert len(lines) == 3  # ShareGPT's answers are not written anew
    _, _, lines = foreseen("model=vicuna-7b", processes=8)
    assert f"about {hours / 8:.2g} hours" in lines[2]


def test_a_local_file_is_read_before_anything_is_said_of_it(monkeypatch, tmp_path):
    Gpus(monkeypatch, (A100, 80 * GB))
    file = tmp_path / "talks.json"
    talk = [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 400}]
    file.write_text(json.dumps([{"conversations": talk}] * 60 + [{"conversations": talk[1:]}]))
    asked = "model=smollm2-135m", "data=conversations", f"data.source={file}"
    asked += "trainer.holdout=6", "trainer.epochs=1", "trainer.batch_tokens=110"
    known = f"(by the characters in {file})"
    _, expected, lines = foreseen(*asked, "data.regenerate=false")
    assert lines[1].endswith(f"for 60 conversations, 6600 tokens {known}")
    assert expected.steps == 54  # of one conversation of (40 + 400) / 4 tokens each
    *_, lines = foreseen(*asked, "data.max_answer_tokens=50", "data.limit=20")
    assert f"for 20 conversations, 1200 tokens {known}" in lines[1]
    *_, lines = foreseen(*asked, "data.max_length=32", "data.regenerate=false")
    assert f"for 60 conversations, 1920 tokens {known}" in lines[1]
    with pytest.raises(ConfigError, match=r"holdout=60 .* of 60 .*Pass trainer\.holdout=6\."):
        foreseen(*asked, "trainer.holdout=60")
    file.write_text("[]")
    with pytest.raises(DataError, match="holds no conversations"):
        foreseen(*asked)
    file.unlink()
    with pytest.raises(DataError, match=f"there is no '{file}'"):
        foreseen(*asked)


def test_what_synthesis_would_hold_out_whole_is_refused(monkeypatch):
    Gpus(monkeypatch, (A100, 80 * GB))
    asked = "data=self_synthesis", "data.shards=2", "data.shard_size=32", "trainer.holdout=64"
    with pytest.raises(ConfigError, match=r"holdout=64 .* of 64 .*Pass trainer\.holdout=6\."):
        foreseen("model=smollm2-135m", *asked)


def test_training_that_cannot_fit_is_refused_and_says_what_takes_most(monkeypatch):
    Gpus(monkeypatch, (A100, 15 * GB))
    with pytest.raises(ConfigError, match=r"training takes 1\d\.\d GB .*target 13\.5 GB.*15\.0 GB"):
        foreseen("model=vicuna-7b")
    Gpus(monkeypatch, (A100, 80 * GB))
    with pytest.raises(ConfigError, match=r"activations .*trainer\.batch_tokens="):
        foreseen("model=vicuna-7b", "trainer.batch_tokens=262144")


def test_keys_and_values_of_texts_that_are_written_are_counted(monkeypatch):
    Gpus(monkeypatch, (A100, 80 * GB))
    asked = ["model=vicuna-7b", "data.regenerate=true"]
    with pytest.raises(ConfigError) as refused:
        foreseen(*asked)
    # 32 layers x 2 x 4096 x 2 bytes x 2048 tokens x 64 texts
    assert "64 texts of up to 2048 tokens take 68.7 GB" in str(refused.value)
    fitting = int(str(refused.value).split("data.batch_size=")[1].split(",")[0])
    *_, lines = foreseen(*asked, f"data.batch_size={fitting}")
    assert f"{fitting} texts at a time" in lines[3]
    with pytest.raises(ConfigError, match=f"Pass data.batch_size={fitting},"):
        foreseen(*asked, f"data.batch_size={fitting + 1}")


def test_the_cache_that_is_counted_is_the_one_that_is_made():
    config = composed("model=vicuna-7b", "data=self_synthesis", "data.batch_size=3")
    lm = blueprint(config.model)
    writing = Writing.of(lm, config.data)
    assert writing.longest == 128 + 320 + 64  # a question, an answer, the template
    assert writing.rows * writing.row == lm.new_cache(3, writing.longest).bytes()


def test_a_target_that_cannot_be_loaded_is_refused(monkeypatch):
    Gpus(monkeypatch, (A100, 60 * GB))
    with pytest.raises(ConfigError, match=r"the target alone takes 65\.1 GB.*device_map=auto"):
        foreseen("model=vicuna-33b", "model.device_map=null")


def test_a_device_map_has_the_memory_of_all_gpus_and_processes_share_it(monkeypatch):
    Gpus(monkeypatch, (A100, 60 * GB), (A100, 50 * GB))
    devices, _, lines = foreseen("model=vicuna-33b")
    assert devices.free == 110 * GB and f"2 x {A100}" in lines[0]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"55\.0 GB free"):
        foreseen("model=vicuna-33b", processes=2)


def test_each_process_counts_its_own_gpu_or_the_one_that_was_asked_for(monkeypatch):
    Gpus(monkeypatch, (A100, 10 * GB), (A100, 20 * GB), current=1)
    model = ModelConfig("m", "random:tiny")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert found(model).free == 20 * GB
    assert found(replace(model, device="cuda:0")).free == 10 * GB
    memory(monkeypatch, 30 * GB)
    assert found(replace(model, device="cpu")) == Devices("CPU", 15 * GB, Device.cpu)


def test_a_sharded_target_is_read_in_host_memory_and_trained_in_parts(monkeypatch):
    Gpus(monkeypatch, (A100, 40 * GB))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    asked = ["model=vicuna-33b", "trainer.shard_target=true"]
    memory(monkeypatch, 600 * GB)
    devices, expected, _ = foreseen(*asked, processes=8)
    assert devices.free == 40 * GB and expected.memory["target"] < 10 * GB
    memory(monkeypatch, 400 * GB)
    with pytest.raises(ConfigError, match=r"the target alone takes 65\.1 GB, and CPU has 50\.0 GB"):
        foreseen(*asked, processes=8)


def test_an_unknown_gpu_is_measured(monkeypatch):
    Gpus(monkeypatch, ("NVIDIA X9", 80 * GB), ("NVIDIA X9", 80 * GB), current=1)
    speeds = {(torch.float16, "cuda:1"): 1e14}
    monkeypatch.setattr(fit, "matmul_speed", lambda *asked: speeds[asked])
    _, expected, lines = foreseen("model=vicuna-7b")
    hours = sum(expected.flops.values()) / (0.4 * 1e14) / 3600
    said = f"about {hours:.2g} hours of training, {hours / 10:.2g} an epoch, at 40% (assumed) of"
    assert f"{said} 100 TFLOP/s (measured)" in lines[2]


def test_a_cpu_is_measured(monkeypatch):
    Gpus(monkeypatch)
    memory(monkeypatch, 8 * GB)
    devices, _, lines = foreseen("model=smollm2-135m")
    assert devices.free == 8 * GB and "(measured)" in lines[2]
    assert "64 texts at a time" in lines[3]


def test_data_that_are_there_are_counted_and_not_written_again(monkeypatch):
    Gpus(monkeypatch, (A100, 10 * GB))
    sample = {"messages": [], "input_ids": [1] * 50, "loss_mask": [0] * 20 + [1] * 30}
    config = composed("model=tiny", "data=mix")
    with pytest.raises(DataError, match="no complete dataset"):
        foreseen("model=tiny", "data=mix")
    for part in config.data.paths:
        store.save([sample] * 300, store.Path(part), {}, {})
    for asked in ([], ["data=mix"]):
        *_, lines = foreseen("model=tiny", *asked)
        assert len(lines) == 3 and f"as they lie in {config.data.paths[0]}" in lines[1]
    assert "600 conversations, 30000 tokens" in lines[1]


def test_remembered_states_count_once_the_text_is_known(monkeypatch):
    Gpus(monkeypatch, (A100, 80 * GB))
    devices, expected, _ = foreseen("model=vicuna-7b", "trainer.cache_target_states=true")
    with pytest.raises(ConfigError, match=r"trainer\.cache_target_states=false"):
        check_training(expected.memory, devices)
