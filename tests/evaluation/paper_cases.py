"""The paper's experiments, as their tests see them."""

from functools import cache

from commands import ROOT
from composing import of_command
from omegaconf import OmegaConf

from kangaroo.cli.command import varied
from kangaroo.evaluation.records import AGAIN

NAMES = """
    table1 adapter_ablation exit_layer threshold steps position parameters temperature tree
""".split()
FILES = {path.stem for path in (ROOT / "configs/experiment/paper").glob("*.yaml")}


@cache
def composed(name, *overrides):
    """The typed config of an experiment."""
    options = [f"experiment=paper/{name}", "output=out", *overrides]
    return OmegaConf.to_object(of_command("evaluate", options))


@cache
def jobs(name, *overrides):
    """What an experiment tells Hydra: its folders and its sweep."""
    options = [f"experiment=paper/{name}", *overrides]
    return of_command("evaluate", options, return_hydra_config=True).hydra


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
