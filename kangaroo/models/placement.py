"""Refuse weights that fit on no device: `device_map` moves them elsewhere and says nothing."""

from __future__ import annotations

import torch
from accelerate.utils import get_max_memory
from transformers import PreTrainedModel

from kangaroo.utils.errors import ModelTooLarge
from kangaroo.utils.folders import TORCHRUN, command_line


def check_placed(model: PreTrainedModel) -> None:
    """Raise `ModelTooLarge` where weights lie on no device that computes.

    Weights that accelerate keeps on the disk, or on the CPU beside GPUs, are on `meta` until a hook
    fetches them. A model of which no part fits on a GPU is on the CPU.
    """
    gpus = torch.cuda.is_available()
    parts = dict(model.named_parameters())
    size = {name: p.numel() * p.element_size() for name, p in parts.items()}
    nowhere = ("meta", "cpu") if gpus else ("meta",)
    aside = {name for name, parameter in parts.items() if parameter.device.type in nowhere}
    if not aside:
        return
    layers = [f"model.layers.{index}." for index in range(model.config.num_hidden_layers)]
    lost = sum(any(name.startswith(layer) for name in aside) for layer in layers)
    others = sorted(name for name in aside if not name.startswith("model.layers."))
    named = ", ".join([f"{lost} of {len(layers)} layers", *others])
    dtype = str(model.dtype).removeprefix("torch.")
    room = get_max_memory()
    where = f"the {len(room) - 1} GPUs" if gpus else "this machine"
    # what was placed has used its room already
    had = sum(size.values()) - sum(size[name] for name in aside)
    had += sum(free for device, free in room.items() if (device != "cpu") == gpus)
    raise ModelTooLarge(
        f"'{model.config.name_or_path}' does not fit: {named} found no place. Its weights take "
        f"{sum(size.values()) / 1e9:.3g} GB in {dtype}, and {where} had "
        f"{had / 1e9:.3g} GB, some of it reserved for what the model computes. Use more or larger "
        "GPUs, model.dtype=bfloat16 if it is float32, model.device_map=sequential (which fills one "
        "GPU before the next), or a smaller model. Training can spread it: "
        f"{command_line('train', launcher=TORCHRUN, trainer__shard_target=True)}."
    )
