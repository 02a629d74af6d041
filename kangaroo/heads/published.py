"""Imports published heads, recognised by their tensors: those of Medusa-1 (FasterDecoding/Medusa on
GitHub) and of EAGLE-1, -2 and -3 (SafeAILab/EAGLE), and the adapters of Kangaroo's authors
(Equationliu/Kangaroo). The latter contain neither the target's name nor the exit layer.

Shapes: D hidden size, K draft vocabulary, V vocabulary.
"""

import hashlib
import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.base import Trainable
from kangaroo.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig, fused_taps
from kangaroo.heads.eagle_head import EagleHead, EagleHeadConfig
from kangaroo.heads.medusa_heads import MedusaHeads, MedusaHeadsConfig
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile

WEIGHTS, CONFIG = "pytorch_model.bin", adapter_files.CONFIG
SAFETENSORS = "model.safetensors"  # saved by newer versions of accelerate instead
FILES = (WEIGHTS, SAFETENSORS, "medusa_lm_head.pt", "medusa_lm_head.safetensors")
WRAPPED = "module."  # prefix of all names if training in several processes saved the checkpoint
FREQUENCIES = "rotary_emb.inv_freq"  # saved by older versions of transformers
# The parts of heads in published checkpoints, and their names here.
ATTENTION = {f"self_attn.{x}_proj": f"attention.{x}_proj" for x in "qkvo"}
LAYER = ATTENTION | {f"mlp.{x}_proj": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")}
LAYER["post_attention_layernorm"] = "middle_norm"
KANGAROO = {f"layers.0.{name}": ours for name, ours in ATTENTION.items()}
KANGAROO |= {"layers.0.input_layernorm": "input_norm", "norm": "norm"}
EAGLE = {"fc": "join"} | {f"layers.0.{name}": ours for name, ours in LAYER.items()}
EAGLE3 = {"fc": "fuse", "norm": "head_norm", "lm_head": "head"} | {
    f"midlayer.{name}": ours
    for name, ours in LAYER.items()
    | {"input_layernorm": "embedding_norm", "hidden_norm": "state_norm"}.items()
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EXIT_LAYERS = {"lmsys/vicuna-7b-v1.3": 2, "lmsys/vicuna-13b-v1.3": 3}  # of released adapters
ROPE_BASE = 10000.0  # of adapters in the code of Kangaroo's authors, for any target
# Fields of a head's config that the target's must equal, and that do not show in a tensor's shape.
COMPARED = ("num_attention_heads", "num_key_value_heads", "vocab_size")
EPSILON = "rms_norm_eps"  # compared, too, for adapters of Kangaroo
# How often the guesses of Medusa's heads for Vicuna-7B are right, by rank; from the accuracies that
# their authors measured (assets/medusa_acc.csv of their repository, "7b").
GUESSES = [
    [0.560, 0.111, 0.055, 0.033, 0.020],
    [0.316, 0.107, 0.062, 0.043, 0.034],
    [0.201, 0.087, 0.060, 0.036, 0.033],
    [0.147, 0.078, 0.049, 0.037, 0.029],
    [0.118, 0.069, 0.048, 0.038, 0.028],
]
Kind = TypeVar("Kind", bound=Trainable)
State = dict[str, Tensor]


@dataclass
class Imported:
    """A published head in its own dtype, the tokens that it drafts from in ascending order (None is
    all), facts for its config, and where it came from."""

    adapter: Trainable
    vocabulary_K: Tensor | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)


def read(source: str, lm: TargetModel, exit_layer: int | None = None) -> Imported:
    """The head in a folder or of a hub id, for a target that may be a `meta_model`; `exit_layer` is
    for adapters of Kangaroo. Errors: `AdapterNotFound`, `CorruptFile`, `AdapterMismatch`;
    `ConfigError` for the exit layer."""
    fix = "Pass source= a folder or hub id."
    folder = adapter_files.find(source, (*FILES, CONFIG), fix)
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise AdapterNotFound(
            f"'{folder}' holds none of {', '.join(FILES)}. {fix.rstrip('.')} of a head in one such "
            "file."
        )
    state = {name.removeprefix(WRAPPED): tensor for name, tensor in _read_state(path).items()}
    state = {name: tensor for name, tensor in state.items() if not name.endswith(FREQUENCIES)}
    is_layer = any(name.startswith("layers.0.self_attn.") for name in state)
    if is_layer and "fc.weight" not in state:
        _read_config(path, lm, (*COMPARED, EPSILON))  # for its errors
        imported = Imported(kangaroo_adapter(path, state, lm, exit_layer))
    elif exit_layer is not None:
        raise ConfigError(
            f"exit_layer={exit_layer} is for adapters of Kangaroo, and '{path}' holds another "
            "method's head. Leave it out."
        )
    elif is_layer:
        imported = _eagle(path, state, lm)
    elif any(name.startswith("midlayer.") for name in state):
        imported = _eagle3(path, state, lm)
    elif all(re.match(r"\d+\.\d+\.", name) for name in state):
        imported = _medusa(path, state, lm)
    else:
        raise AdapterMismatch(
            f"'{path}' has the layout of no head that is known (Kangaroo, Medusa-1, EAGLE-1, -2 "
            f"and -3): its tensors are {_few(list(state))}. Pass source= one of these."
        )
    if (name := adapter_files.not_finite(imported.adapter.state_dict())) is not None:
        raise _unreadable(path, f"{name} holds numbers that are not finite")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    imported.origin = {"source": source, "file": path.name, "sha256": digest}
    return imported


def kangaroo_adapter(path: Path, state: State, lm: TargetModel, exit_layer: int | None) -> Adapter:
    """The adapter of a checkpoint by Kangaroo's authors, by default at the exit layer of the one
    that they released for `lm`. Errors: `ConfigError` without an exit layer; `AdapterMismatch`, too
    for a target that their code computes in another way."""
    layer = exit_layer if exit_layer is not None else EXIT_LAYERS.get(lm.name)
    if layer is None:
        released = ", ".join(f"{layer} for {name}" for name, layer in EXIT_LAYERS.items())
        raise ConfigError(
            "a checkpoint of Kangaroo's authors does not say at which exit layer it was trained, "
            f"and of {lm.name} it is not known (it is {released}). Pass exit_layer= the number of "
            "the target's layers below the adapter."
        )
    target, rope = lm.config, lm.config.rope_parameters
    is_llama = target.model_type == "llama" and not target.attention_bias
    has_rope = is_llama and rope["rope_type"] == "default" and rope["rope_theta"] == ROPE_BASE
    if not has_rope or target.head_dim * target.num_attention_heads != target.hidden_size:
        raise AdapterMismatch(
            f"{lm.name} is a {target.model_type} model with {rope}. The code of Kangaroo's authors "
            "has one kind of attention for its adapters: Llama's without biases, all heads "
            f"together as wide as the hidden state, RoPE of base {ROPE_BASE:g}. Pass model= a "
            "target of that kind."
        )
    with torch.device("meta"):
        adapter = Adapter(lm, layer)
    return _fitted(adapter, path, state, KANGAROO, lm)


def _medusa(path: Path, state: State, lm: TargetModel) -> Imported:
    """`Head_k(x + SiLU(W_k x + b_k))`, saved as a list of sequences of a block and a head."""
    count = 1 + max(int(name.split(".")[0]) for name in state)
    names = {f"{k}.0.linear": f"blocks.{k}" for k in range(count)}
    names |= {f"{k}.1": f"heads.{k}" for k in range(count)}
    with torch.device("meta"):
        heads = MedusaHeads(lm, MedusaHeadsConfig(heads=count, bias=True))
    heads = _fitted(heads, path, state, names, lm)
    guesses = [GUESSES[min(k, len(GUESSES) - 1)] for k in range(count)]
    return Imported(heads, facts={"guesses": guesses})


def _eagle(path: Path, state: State, lm: TargetModel) -> Imported:
    config = _read_config(path, lm)
    parts = EagleHeadConfig(
        sees_first=False,
        rope_base=_rope_base(path, config, lm),
        norm_eps=_norm_eps(config, lm),
    )
    with torch.device("meta"):
        head = EagleHead(lm, parts)
    return Imported(_fitted(head, path, state, EAGLE, lm))


def _eagle3(path: Path, state: State, lm: TargetModel) -> Imported:
    config = _read_config(path, lm)
    outputs = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    taps = fused_taps(lm.n_layers)
    if outputs and tuple(layer + 1 for layer in outputs) != taps:
        raise AdapterMismatch(
            f"the {CONFIG} beside '{path}' fuses the outputs of layers {outputs}; here they are "
            f"{[tap - 1 for tap in taps]}, as in the released code. Pass source= another head."
        )
    vocabulary_K = _draft_vocabulary(path, state, lm)
    parts = Eagle3HeadConfig(rope_base=_rope_base(path, config, lm), norm_eps=_norm_eps(config, lm))
    if config.intermediate_size != lm.config.intermediate_size:
        parts.feed_forward_size = config.intermediate_size
    with torch.device("meta"):
        head = Eagle3Head(lm, parts, vocabulary_K)
    return Imported(_fitted(head, path, state, EAGLE3, lm), vocabulary_K)


def _draft_vocabulary(path: Path, state: State, lm: TargetModel) -> Tensor | None:
    """The tokens of the head's rows, which are put in ascending order; None if it has all. `d2t` is
    the difference between each row's token and its number, `t2d` says which tokens have a row."""
    size, head_KD = lm.config.vocab_size, state.get("lm_head.weight")
    inside_V, offsets_K = state.pop("t2d", None), state.pop("d2t", None)
    if offsets_K is None or (head_KD is not None and len(head_KD) == size):
        return None  # the released code, too, does not read them for a head of all tokens
    if offsets_K.dim() != 1 or not len(offsets_K):
        raise _misfit(path, lm, [f"d2t is {list(offsets_K.shape)}, not a list of tokens"])
    tokens_K, order_K = (torch.arange(len(offsets_K)) + offsets_K.long()).sort()
    faults = []
    if inside_V is not None and len(inside_V) != size:
        faults.append(f"t2d is of {len(inside_V)} tokens, and the target has {size}")
    elif inside_V is not None and not torch.equal(inside_V.bool().nonzero()[:, 0], tokens_K):
        faults.append("t2d and d2t name different tokens")
    if not (tokens_K[0] >= 0 and tokens_K[-1] < size):
        faults.append(f"d2t names token {int(tokens_K[-1])}, and the target has {size}")
    if len(tokens_K.unique()) < len(tokens_K):
        faults.append("d2t names a token twice")
    if head_KD is not None and len(head_KD) != len(tokens_K):
        faults.append(f"lm_head has {len(head_KD)} rows, and d2t {len(tokens_K)}")
    if faults:
        raise _misfit(path, lm, faults)
    if head_KD is not None:
        state["lm_head.weight"] = head_KD[order_K]
    return tokens_K


def _fitted(
    adapter: Kind, path: Path, state: State, names: Mapping[str, str], lm: TargetModel
) -> Kind:
    """The adapter with a checkpoint's weights; `names` has the parts' names there and here. Biases
    that the checkpoint lacks are zero; embeddings are the target's. Errors: `AdapterMismatch`."""
    theirs = {ours: name for name, ours in names.items()}
    shapes = {"embed_tokens.weight": (lm.config.vocab_size, lm.config.hidden_size)}
    weights, faults = dict[str, Tensor](), list[str]()
    for ours, empty in adapter.state_dict().items():
        part, _, kind = ours.rpartition(".")
        name = f"{theirs.get(part, part)}.{kind}"
        shapes[name] = (*empty.shape,)
        if name in state:
            weights[ours] = state[name]
        elif kind == "bias":
            weights[ours] = torch.zeros(empty.shape, dtype=next(iter(state.values())).dtype)
        else:
            faults.append(f"it lacks {name}")
    for name, tensor in state.items():
        if name not in shapes:
            faults.append(f"{name} has no place")
        elif tuple(tensor.shape) != shapes[name]:
            faults.append(f"{name} is {list(tensor.shape)}, not {list(shapes[name])}")
    if faults:
        raise _misfit(path, lm, faults)
    return adapter_files.assign_weights(adapter, weights, f"'{path}' cannot be used")


def _rope_base(path: Path, config: LlamaConfig, lm: TargetModel) -> float | None:
    """The base of the head's RoPE; None if it is the target's. The released code takes 10,000 where
    a config gives none, for any target."""
    ropes = (x.rope_parameters.items() for x in (config, lm.config))
    rope, own = ({k: v for k, v in fields if k != "type"} for fields in ropes)
    if rope == own:
        return None
    if rope["rope_type"] != "default":
        raise AdapterMismatch(
            f"the {CONFIG} beside '{path}' has the RoPE {rope}, and {lm.name} has {own}. Scaled "
            "RoPE has to be the target's: pass model= the target that it was trained for."
        )
    return float(rope["rope_theta"])


def _norm_eps(config: LlamaConfig, lm: TargetModel) -> float | None:
    """The epsilon of the head's norms; None if it is the target's."""
    return None if _is_equal(EPSILON, config, lm) else float(config.rms_norm_eps)


def _is_equal(name: str, config: LlamaConfig, lm: TargetModel) -> bool:
    # an epsilon may be a rounded float32
    return math.isclose(getattr(config, name), getattr(lm.config, name), rel_tol=1e-6)


def _read_config(path: Path, lm: TargetModel, compared: Sequence[str] = COMPARED) -> LlamaConfig:
    """The config beside a checkpoint. Errors: `AdapterNotFound`, `CorruptFile`; `AdapterMismatch`
    for that of another target."""
    file = path.with_name(CONFIG)
    if not file.is_file():
        raise AdapterNotFound(
            f"'{path.parent}' holds no {CONFIG}. Training by the authors' code leaves it out: copy "
            "the one that was trained with (for Kangaroo its data/vicuna_7B_config.json) there."
        )
    try:
        fields = json.loads(file.read_text())
        config = LlamaConfig(**fields)
    except (ValueError, TypeError, ArithmeticError, StrictDataclassError) as error:
        raise _unreadable(file, " ".join(str(error).split())) from error  # no JSON, or no Llama
    if "speculators_model_type" in fields:
        raise AdapterMismatch(
            f"'{path.parent}' is in the layout of the library speculators, which is written here "
            "and not read. Pass source= the head as its authors published it."
        )
    for name in compared:
        if not _is_equal(name, config, lm):
            raise AdapterMismatch(
                f"the {CONFIG} beside '{path}' says {name}={getattr(config, name)}; {lm.name} has "
                f"{getattr(lm.config, name)}. Pass model= the target that it was trained for, not "
                f"{lm.name}."
            )
    return config


def _read_state(path: Path) -> State:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own words advise to run what the file says
        raise _unreadable(path, "it is damaged, or holds more than tensors") from error
    except Exception as error:  # torch raises anything on a truncated pickle
        reason = str(error).partition("\n")[0] or "it ends too early"
        raise _unreadable(path, f"{type(error).__name__}: {reason}") from error
    is_state = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    if not (is_state and state) or not all(isinstance(x, Tensor) for x in state.values()):
        raise _unreadable(path, "it holds something other than a state dict of tensors")
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.dtype not in FLOATS:
            raise _unreadable(path, f"{name} is of {tensor.dtype}, no format of weights here")
    return state


def _unreadable(path: Path, reason: str) -> CorruptFile:
    return CorruptFile(f"'{path}' cannot be read ({reason}). Fetch it again.")


def _misfit(path: Path, lm: TargetModel, faults: list[str]) -> AdapterMismatch:
    fix = f"Pass model= the target that it was trained for, not {lm.name}."
    return AdapterMismatch(f"'{path}' does not fit this target: {_few(faults)}. {fix}")


def _few(words: list[str]) -> str:
    """The first four of these words, and how many more there are."""
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")
