"""Adapters in the layout of the authors' code (github.com/Equationliu/Kangaroo).

There an adapter is a state dict of six tensors, named as in a Llama of one layer, beside that
Llama's `config.json`. Neither says which target it is for, nor at which layer it sits.
"""

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
SAFETENSORS = "model.safetensors"  # what newer versions of accelerate save instead
NAMES = {
    "layers.0.input_layernorm.weight": "input_norm.weight",
    **{f"layers.0.self_attn.{x}_proj.weight": f"attention.{x}_proj.weight" for x in "qkvo"},
    "norm.weight": "norm.weight",
}
# frequencies of positions, which older versions of transformers saved: they follow from the config
IGNORED = "layers.0.self_attn.rotary_emb.inv_freq"
# fields of its config that no shape shows
COMPARED = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size")
WRAPPED = "module."  # before every name, if training in several processes saved the checkpoint
ROPE_BASE = 10000.0  # of the official code, whatever the target's
# of the released checkpoints, by their targets
EXIT_LAYERS = {"lmsys/vicuna-7b-v1.3": 2, "lmsys/vicuna-13b-v1.3": 3}


def exit_layer(given: int | None, lm: TargetModel) -> int:
    """The given exit layer, else that of the checkpoint released for this target. Errors:
    `ConfigError` where there is none."""
    layer = given if given is not None else EXIT_LAYERS.get(lm.name)
    if layer is None:
        released = ", ".join(f"{layer} for {name}" for name, layer in EXIT_LAYERS.items())
        raise ConfigError(
            "an official checkpoint does not say at which exit layer it was trained, and of "
            f"{lm.name} it is not known (it is {released}). Pass exit_layer= the number of the "
            "target's layers below the adapter."
        )
    return layer


def read(source: str, lm: TargetModel, exit_layer: int) -> tuple[Adapter, dict[str, str]]:
    """The adapter in a folder, or of a hub id that is downloaded, and where it came from, for its
    provenance. Of `lm` it takes the shapes alone; the weights keep their dtype. Errors:
    `AdapterNotFound`; `CorruptFile`; `AdapterMismatch` with the tensor or setting."""
    files = (WEIGHTS, SAFETENSORS, CONFIG)
    folder = adapter_files.find(source, files, "Pass source= a folder or hub id.")
    paths = [folder / name for name in files[:2] if (folder / name).is_file()]
    if not paths:
        raise AdapterNotFound(
            f"'{folder}' holds neither {WEIGHTS} nor {SAFETENSORS}: it is no official checkpoint."
        )
    if not (folder / CONFIG).is_file():
        raise AdapterNotFound(
            f"'{folder}' holds no {CONFIG}. Training by the official code leaves it out: copy its "
            "data/vicuna_7B_config.json, or the one that was trained with, there under this name."
        )
    path, about = paths[0], folder / CONFIG
    try:
        config = LlamaConfig(**json.loads(about.read_text()))
    except (ValueError, TypeError, StrictDataclassError) as error:  # no JSON, or no such Llama
        raise _unreadable(about, str(error)) from error
    adapter = fitted(path, _state(path), config, lm, exit_layer)
    if (wrong := adapter_files.not_finite(adapter.state_dict())) is not None:
        raise _unreadable(path, f"{wrong} holds numbers that are not finite")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return adapter, {"source": source, "file": path.name, "sha256": digest}


def fitted(
    path: Path, state: dict[str, Tensor], config: LlamaConfig, lm: TargetModel, exit_layer: int
) -> Adapter:
    """The adapter that these weights at `path` are for `lm`. Errors: `AdapterMismatch`."""
    _check_target(lm)
    fit = f"Pass model= the target that it was trained for, not {lm.name}"
    for field in COMPARED:
        theirs, ours = getattr(config, field), getattr(lm.config, field)
        if not math.isclose(theirs, ours, rel_tol=1e-6):  # an epsilon may have been a float32
            raise AdapterMismatch(
                f"the {CONFIG} beside '{path}' says {field}={theirs}; {lm.name} has {ours}. {fit}."
            )
    state = {name.removeprefix(WRAPPED): tensor for name, tensor in state.items()}
    state = {NAMES.get(name, name): tensor for name, tensor in state.items() if name != IGNORED}
    with torch.device("meta"):
        adapter = Adapter(lm, exit_layer)
    fault = f"'{path}' is not the paper's adapter (one attention layer, two norms, and the "
    return adapter_files.filled(adapter, state, f"{fault}target's head) for this target. {fit}")


def _state(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a cut pickle torch raises whatever comes of its last opcode
        raise _unreadable(path, f"{type(error).__name__}: {error}".splitlines()[0]) from error
    is_state = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    if not is_state or not all(isinstance(x, Tensor) for x in state.values()):
        raise _unreadable(path, "it holds something other than a state dict of tensors")
    return state


def _unreadable(path: Path, reason: str) -> CorruptFile:
    return CorruptFile(f"'{path}' cannot be read ({reason}). Fetch it again.")


def _check_target(lm: TargetModel) -> None:
    """Raise `AdapterMismatch` for a target that the official code computes otherwise than we do."""
    config, rope = lm.config, lm.config.rope_parameters
    of_llama = config.model_type == "llama" and not config.attention_bias
    usual_rope = of_llama and rope["rope_type"] == "default" and rope["rope_theta"] == ROPE_BASE
    if not usual_rope or config.head_dim * config.num_attention_heads != config.hidden_size:
        raise AdapterMismatch(
            f"{lm.name} is a {config.model_type} model with {rope}. The official code has one kind "
            "of attention for its adapters: Llama's without biases, all heads together as wide as "
            f"the hidden state, RoPE of base {ROPE_BASE:g}. Pass model= a target of that kind."
        )
