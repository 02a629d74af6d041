"""A target without its weights: enough to estimate what it needs, before any download."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from kangaroo.models.known_configs import SHAPES, shape_of
from kangaroo.models.loading import ModelConfig
from kangaroo.models.random_models import RANDOM, TINY, random_model
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ModelNotFound, UnsupportedModel


def meta_model(config: ModelConfig) -> TargetModel:
    """The target's modules on the meta device: every shape, no weight.

    A model of `SHAPES` needs no download, another one only its config.

    Errors: `ModelNotFound` where neither that table, nor a folder, nor the hub knows its shape;
    `UnsupportedModel` for an architecture that is no target.
    """
    shape = _config(config)
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(shape, dtype=config.dtype.torch)
    except ValueError as error:
        raise UnsupportedModel(
            f"'{config.path}' cannot be a target: {str(error).splitlines()[0]} Choose another "
            "model.path."
        ) from error
    hf.config.name_or_path = config.path
    return TargetModel(hf)


def _config(config: ModelConfig) -> PretrainedConfig:
    if config.path == TINY:
        return random_model().config
    if shape := shape_of(config.path.removeprefix(RANDOM)):
        return AutoConfig.for_model(**shape)
    try:
        return AutoConfig.from_pretrained(config.path, revision=config.revision)
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"the shape of '{config.path}' is not known: no folder has this name and the hub did "
            f"not give its config: {str(error).splitlines()[0]} Go online, pass model.path= a "
            f"local folder, or choose one of {', '.join(SHAPES)}."
        ) from error
