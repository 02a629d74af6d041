"""The paper's experiments, as their tests see them."""

from functools import cache

from commands import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kangaroo import cli
from kangaroo.cli.command import varied
from kangaroo.evaluation.records import AGAIN

NAMES = """
    table1 adapter_ablation exit_layer threshold steps position parameters temperature tree
""".split()
FILES = {path.stem for path in (ROOT / "configs/experiment/paper").glob("*.yaml")}


@cache
def composed(name, *overrides):
    """The typed config of an experiment."""
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        return OmegaConf.to_object(
            compose("evaluate", [f"experiment=paper/{name}", "output=out", *overrides])
        )


@cache
def jobs(name, *overrides):
    """What an experiment tells Hydra: its folders and its sweep."""
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        words = [f"experiment=paper/{name}", *overrides]
        return compose("evaluate", words, return_hydra_config=True).hydra


def methods_of(name):
    """The names of the folders that an experiment's results lie in, but for the noise floor's."""
    config = composed(name)
    names = [*varied(config.drafter, config.variants), *config.more]
    names.remove(AGAIN)
    if name != "temperature":
        return names
    params = jobs(name).sweeper.params
    return [
        f"temperature={temperature},Rule.{rule}/{names[0]}"
        for temperature in str(params["sampling.temperature"]).split(",")
        for rule in params["sampling.rule"].split(",")
    ]
