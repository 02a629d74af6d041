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
NAMES = sorted(CPU.keys() & CONFIGS.keys())


def sizes(config):
    """A drafter's options, but for where a model's files lie."""
    options = asdict(config).items()
    return {key: x for key, x in options if key not in ("adapter", "heads", "datastore")}


def drafters(*options):
    more = (f"+drafter@more.{name}={name}" for name in NAMES)
    config = OmegaConf.to_object(composed("evaluate", *more, *options).more)
    return {name: sizes(drafter) for name, drafter in config.items()}


def test_sizes_are_those_measured_on_a_cpu_or_on_a_gpu_the_papers(monkeypatch):
    papers = {name: sizes(CONFIGS[name]()) for name in NAMES}
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert drafters() == {name: papers[name] | CPU[name] for name in NAMES}
    assert drafters("hardware=gpu") == {name: papers[name] | GPU[name] for name in NAMES} == papers
    assert all(CPU[name].keys() == GPU[name].keys() for name in NAMES)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert drafters() == papers


@pytest.mark.parametrize("hardware, expected", [("cpu", (3, 7, 5, 4)), ("gpu", (10, 59, 10, 63))])
def test_eagle_2s_tree_and_the_drafters_of_a_cascade_have_them_too(hardware, expected):
    options = ["drafter=cascade", "drafter@drafter.second=medusa", "+drafter@more.tree=eagle_tree"]
    config = composed("evaluate", *options, f"hardware={hardware}")
    tree, both = config.more.tree, config.drafter
    assert (tree.top_k, tree.nodes, both.first.num_pred_tokens, both.second.nodes) == expected


def test_every_command_has_them_and_the_command_line_wins(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in ("chat", "speed"):
        assert composed(command, "drafter=medusa").drafter.nodes == 4
    on_gpu = "drafter=medusa", "hardware=gpu"
    assert composed("speed", *on_gpu).drafter.nodes == 63
    assert composed("chat", *on_gpu, "drafter.nodes=7").drafter.nodes == 7
