"""What the configs compose to, and the names of those there are."""

from commands import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kangaroo.cli import commands as cli
from kangaroo.models.loading import known_models

MODELS = [model["name"] for model in known_models()]
DRAFTERS = sorted(path.stem for path in (ROOT / "configs/drafter").glob("*.yaml"))


def of_command(command, options, **how):
    """The config of a command, as `make_data` or as `prepare layers`, with these options."""
    with initialize_config_dir(cli.schema.CONFIGS, version_base="1.3"):
        return compose(command.replace(" ", "_"), list(options), **how)


def composed(name, *overrides):
    config = of_command(name, overrides, return_hydra_config=True)
    OmegaConf.resolve(config.model)
    return config
