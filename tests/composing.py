"""What the configs compose to, and the names of those there are."""

from __future__ import annotations

from commands import ROOT
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kangaroo import cli
from kangaroo.models.loading import known_models

MODELS = [model["name"] for model in known_models()]
DRAFTERS = sorted(path.stem for path in (ROOT / "configs/drafter").glob("*.yaml"))


def composed(name, *overrides):
    with initialize_config_dir(cli.CONFIGS, version_base="1.3"):
        config = compose(name, list(overrides), return_hydra_config=True)
    OmegaConf.resolve(config.model)
    return config
