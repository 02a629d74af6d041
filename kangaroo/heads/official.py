"""Adapters in the layout of the authors' code (github.com/Equationliu/Kangaroo): a state dict of 6
tensors, named as in a Llama with one layer, beside that Llama's `config.json`. Neither contains the
target's name or the exit layer."""

import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, ConfigError

NAMES = {
    "layers.0.input_layernorm.weight": "input_norm.weight",
    **{f"layers.0.self_attn.{x}_proj.weight": f"attention.{x}_proj.weight" for x in "qkvo"},
    "norm.weight": "norm.weight",
}
# config fields that do not show in a tensor's shape
COMPARED = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size")
ROPE_BASE = 10000.0  # in the official code, for any target
EXIT_LAYERS = {"lmsys/vicuna-7b-v1.3": 2, "lmsys/vicuna-13b-v1.3": 3}  # of released checkpoints


def exit_layer(option: int | None, lm: TargetModel) -> int:
    """The exit layer, by default of the checkpoint released for `lm`. Errors: `ConfigError`."""
    layer = option if option is not None else EXIT_LAYERS.get(lm.name)
    if layer is None:
        released = ", ".join(f"{layer} for {name}" for name, layer in EXIT_LAYERS.items())
        raise ConfigError(
            "an official checkpoint does not say at which exit layer it was trained, and of "
            f"{lm.name} it is not known (it is {released}). Pass exit_layer= the number of the "
            "target's layers below the adapter."
        )
    return layer


def fitted(
    path: Path, state: dict[str, Tensor], config: LlamaConfig, lm: TargetModel, exit_layer: int
) -> Adapter:
    """The adapter for `lm` with these weights from `path`. Errors: `AdapterMismatch`."""
    _check_target(lm)
    check_config(path, config, lm)
    state = {NAMES.get(name, name): tensor for name, tensor in state.items()}
    with torch.device("meta"):
        adapter = Adapter(lm, exit_layer)
    fault = f"'{path}' is not the paper's adapter (one attention layer, two norms, and the "
    fault += "target's head) for this target. Pass model= the target that it was trained for, "
    fault += f"not {lm.name}"
    return adapter_files.assign_weights(adapter, state, fault)


def check_config(path: Path, config: LlamaConfig, lm: TargetModel) -> None:
    """Raise `AdapterMismatch` where the config beside a checkpoint is of another target."""
    for field in COMPARED:
        value, expected = getattr(config, field), getattr(lm.config, field)
        if not math.isclose(value, expected, rel_tol=1e-6):  # an epsilon may be a rounded float32
            raise AdapterMismatch(
                f"the {adapter_files.CONFIG} beside '{path}' says {field}={value}; {lm.name} has "
                f"{expected}. Pass model= the target that it was trained for, not {lm.name}."
            )


def _check_target(lm: TargetModel) -> None:
    """Raise `AdapterMismatch` for a target that the official code computes differently."""
    config, rope = lm.config, lm.config.rope_parameters
    is_llama = config.model_type == "llama" and not config.attention_bias
    has_rope = is_llama and rope["rope_type"] == "default" and rope["rope_theta"] == ROPE_BASE
    if not has_rope or config.head_dim * config.num_attention_heads != config.hidden_size:
        raise AdapterMismatch(
            f"{lm.name} is a {config.model_type} model with {rope}. The official code has one kind "
            "of attention for its adapters: Llama's without biases, all heads together as wide as "
            f"the hidden state, RoPE of base {ROPE_BASE:g}. Pass model= a target of that kind."
        )
