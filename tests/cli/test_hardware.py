"""The sizes of trees, drafts and windows: small on a CPU, the papers' elsewhere."""

from dataclasses import asdict

import pytest
import yaml
from commands import ROOT
from composing import composed
from omegaconf import OmegaConf

from kangaroo.drafters.base import DrafterConfig
from kangaroo.utils.discovery import classes

CONFIGS = classes("kangaroo.drafters", DrafterConfig)
CPU, GPU = yaml.safe_load((ROOT / "configs/groups/hardware.yaml").read_text()).values()
PLACES = ("adapter", "heads", "datastore")  # where a model's files lie


def drafter(name, *options, command="evaluate"):
    config = OmegaConf.to_object(composed(command, f"drafter={name}", *options).drafter)
    return {key: value for key, value in asdict(config).items() if key not in PLACES}


@pytest.mark.parametrize("name", sorted(CPU.keys() & CONFIGS.keys()))
def test_sizes_are_those_measured_on_a_cpu_or_on_a_gpu_the_papers(name, monkeypatch):
    papers = {k: v for k, v in asdict(CONFIGS[name]()).items() if k not in PLACES}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert drafter(name) == papers | CPU[name]
    assert drafter(name, "hardware=gpu") == papers
    assert papers == papers | GPU[name] and CPU[name].keys() == GPU[name].keys()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert drafter(name) == papers


@pytest.mark.parametrize("hardware, sizes", [("cpu", (3, 7)), ("gpu", (10, 59))])
def test_eagle_2s_tree_has_sizes_though_its_class_is_eagles(hardware, sizes):
    options = drafter("eagle_tree", f"hardware={hardware}")
    assert (options["top_k"], options["nodes"]) == sizes


def test_every_command_has_them_and_the_command_line_wins(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in ("chat", "speed"):
        assert drafter("medusa", command=command)["nodes"] == 4
        assert drafter("medusa", "hardware=gpu", command=command)["nodes"] == 63
    assert drafter("medusa", "hardware=gpu", "drafter.nodes=7")["nodes"] == 7


def test_a_cascades_drafters_have_them_too(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for hardware, sizes in (("cpu", (5, 4)), ("gpu", (10, 63))):
        options = ["drafter@drafter.second=medusa", f"hardware={hardware}"]
        both = drafter("cascade", *options)
        assert (both["first"]["num_pred_tokens"], both["second"]["nodes"]) == sizes
