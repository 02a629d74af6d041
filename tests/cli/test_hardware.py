"""The sizes of trees, drafts and windows: small on a CPU, the papers' elsewhere."""

import dataclasses

import pytest
import yaml
from commands import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kangaroo import cli
from kangaroo.drafters.hybrid import HybridConfig
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.kangaroo_tree import KangarooTreeConfig
from kangaroo.drafters.lookahead import LookaheadConfig
from kangaroo.drafters.medusa import MedusaConfig
from kangaroo.drafters.prompt_lookup import PromptLookupConfig
from kangaroo.drafters.rest import RestConfig

CONFIGS = {
    "hybrid": HybridConfig,
    "kangaroo": KangarooConfig,
    "kangaroo_tree": KangarooTreeConfig,
    "lookahead": LookaheadConfig,
    "medusa": MedusaConfig,
    "prompt_lookup": PromptLookupConfig,
    "rest": RestConfig,
}
# as docs/methods.md has them
MEASURED = {
    "kangaroo": {"threshold": 0.4},
    "kangaroo_tree": {"steps": 6, "threshold": 0.3, "top_k": 3, "nodes": 7, "min_confidence": 0.07},
    "hybrid": {"nodes": 9},
    "lookahead": {"window": 2, "ngram": 3, "guesses": 1},
    "medusa": {"nodes": 4},
    "prompt_lookup": {"num_pred_tokens": 5},
    "rest": {"num_draft": 3},
}


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def composed(*overrides, command="evaluate"):
    output = [] if command == "chat" else ["output=out"]
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        return OmegaConf.to_object(compose(command, [*output, *overrides]))


def papers(drafter):
    """The sizes that its dataclass has, which are the papers'."""
    config = CONFIGS[drafter]()
    return {name: getattr(config, name) for name in MEASURED[drafter]}


def sizes(config):
    """The fields of a composed drafter that hardware= sets, which leave all others alone."""
    mine = MEASURED[config.name]
    default = CONFIGS[config.name]()
    for field in dataclasses.fields(config):
        if field.name not in (*mine, "adapter", "heads", "datastore"):
            assert getattr(config, field.name) == getattr(default, field.name)
    return {name: getattr(config, name) for name in mine}


@pytest.mark.parametrize("drafter", MEASURED)
def test_without_a_gpu_sizes_are_those_measured_on_a_cpu(drafter, no_gpu):
    for asked in ([], ["model=vicuna-7b"]):
        assert sizes(composed(f"drafter={drafter}", *asked).drafter) == MEASURED[drafter]


@pytest.mark.parametrize("command", ["chat", "speed"])
def test_every_command_has_the_same_sizes(command, no_gpu):
    assert composed("drafter=medusa", command=command).drafter.nodes == 4
    assert composed("drafter=medusa", "hardware=gpu", command=command).drafter.nodes == 63


@pytest.mark.parametrize("drafter", MEASURED)
def test_on_a_gpu_sizes_are_the_papers(drafter, monkeypatch):
    assert sizes(composed(f"drafter={drafter}", "hardware=gpu").drafter) == papers(drafter)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert sizes(composed(f"drafter={drafter}").drafter) == papers(drafter)
    assert papers("hybrid") == {"nodes": 15}
    assert papers("medusa") == {"nodes": 63} and papers("rest") == {"num_draft": 64}
    assert papers("lookahead") == {"window": 15, "ngram": 5, "guesses": 15}
    assert papers("prompt_lookup") == {"num_pred_tokens": 10}
    assert papers("kangaroo") == {"threshold": 0.6}
    tree = papers("kangaroo_tree")
    assert tree == {"steps": 6, "threshold": 0.4, "top_k": 10, "nodes": 32, "min_confidence": None}


def test_a_cascades_drafters_have_them_too(no_gpu):
    asked = ["drafter=cascade", "drafter@drafter.second=medusa"]
    config = composed(*asked).drafter
    assert (config.first.num_pred_tokens, config.second.nodes) == (5, 4)
    config = composed(*asked, "hardware=gpu").drafter
    assert (config.first.num_pred_tokens, config.second.nodes) == (10, 63)


def test_what_the_command_line_says_wins():
    config = composed("drafter=medusa", "hardware=gpu", "drafter.nodes=7")
    assert config.drafter.nodes == 7
    assert config.hardware["medusa"] == {"nodes": 63}


def test_both_choices_name_the_same_sizes():
    cpu, gpu = yaml.safe_load((ROOT / "configs/groups/hardware.yaml").read_text()).values()
    assert cpu.pop("paper").keys() == gpu.pop("paper").keys()  # of experiments, not of a drafter
    assert cpu == MEASURED and gpu == {drafter: papers(drafter) for drafter in MEASURED}
