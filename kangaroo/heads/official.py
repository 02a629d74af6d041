"""Adapters in the layout of the authors' code (github.com/Equationliu/Kangaroo): a state dict of 6
tensors, named as in a Llama with one layer, beside that Llama's `config.json`. Neither contains the
target's name or the exit layer."""

import hashlib
import json
import math
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile

WEIGHTS, CONFIG = "pytorch_model.bin", "config.json"
SAFETENSORS = "model.safetensors"  # saved by newer versions of accelerate instead
NAMES = {
    "layers.0.input_layernorm.weight": "input_norm.weight",
    **{f"layers.0.self_attn.{x}_proj.weight": f"attention.{x}_proj.weight" for x in "qkvo"},
    "norm.weight": "norm.weight",
}
IGNORED = "layers.0.self_attn.rotary_emb.inv_freq"  # saved by older versions of transformers
# config fields that do not show in a tensor's shape
COMPARED = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size")
WRAPPED = "module."  # prefix of all names if training in several processes saved the checkpoint
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


def read(source: str, lm: TargetModel, exit_layer: int) -> tuple[Adapter, dict[str, str]]:
    """The adapter in a folder or of a hub id, in its own dtype, and its provenance. `lm` may be a
    `meta_model`. Errors: `AdapterNotFound`, `CorruptFile`, `AdapterMismatch`."""
    files = (WEIGHTS, SAFETENSORS, CONFIG)
    folder = adapter_files.find(source, files, "Pass source= a folder or hub id.")
    path = next((folder / name for name in files[:2] if (folder / name).is_file()), None)
    if path is None:
        raise AdapterNotFound(
            f"'{folder}' holds neither {WEIGHTS} nor {SAFETENSORS}: it is no official checkpoint."
        )
    if not (folder / CONFIG).is_file():
        raise AdapterNotFound(
            f"'{folder}' holds no {CONFIG}. Training by the official code leaves it out: copy its "
            "data/vicuna_7B_config.json, or the one that was trained with, there under this name."
        )
    try:
        config = LlamaConfig(**json.loads((folder / CONFIG).read_text()))
    except (ValueError, TypeError, StrictDataclassError) as error:  # no JSON, or no such Llama
        raise _unreadable(folder / CONFIG, str(error)) from error
    adapter = fitted(path, _read_state(path), config, lm, exit_layer)
    if (name := adapter_files.not_finite(adapter.state_dict())) is not None:
        raise _unreadable(path, f"{name} holds numbers that are not finite")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return adapter, {"source": source, "file": path.name, "sha256": digest}


def fitted(
    path: Path, state: dict[str, Tensor], config: LlamaConfig, lm: TargetModel, exit_layer: int
) -> Adapter:
    """The adapter for `lm` with these weights from `path`. Errors: `AdapterMismatch`."""
    _check_target(lm)
    fix = f"Pass model= the target that it was trained for, not {lm.name}"
    for field in COMPARED:
        value, expected = getattr(config, field), getattr(lm.config, field)
        if not math.isclose(value, expected, rel_tol=1e-6):  # an epsilon may be a rounded float32
            difference = f"says {field}={value}; {lm.name} has {expected}"
            raise AdapterMismatch(f"the {CONFIG} beside '{path}' {difference}. {fix}.")
    state = {name.removeprefix(WRAPPED): tensor for name, tensor in state.items()}
    state = {NAMES.get(name, name): tensor for name, tensor in state.items() if name != IGNORED}
    with torch.device("meta"):
        adapter = Adapter(lm, exit_layer)
    fault = f"'{path}' is not the paper's adapter (one attention layer, two norms, and the "
    fault += f"target's head) for this target. {fix}"
    return adapter_files.assign_weights(adapter, state, fault)


def _read_state(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises anything on a truncated pickle
        raise _unreadable(path, f"{type(error).__name__}: {error}".splitlines()[0]) from error
    is_state = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    if not is_state or not all(isinstance(x, Tensor) for x in state.values()):
        raise _unreadable(path, "it holds something other than a state dict of tensors")
    return state


def _unreadable(path: Path, reason: str) -> CorruptFile:
    return CorruptFile(f"'{path}' cannot be read ({reason}). Fetch it again.")


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
