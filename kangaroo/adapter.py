"""The adapter: from the exit layer's hidden state to one that the target's own head can read.

`f' = f + Attention(Norm(f))`, drafted logits are `Head(Norm(f'))`: one attention layer, two norms,
no feed-forward part, and the LM head stays the target's (Kangaroo, arXiv 2404.18911, section 3.2).

Shapes: B rows, N tokens of a block, D hidden size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kangaroo.cache import Block, KVCache
from kangaroo.errors import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile
from kangaroo.model import LM

WEIGHTS, CONFIG, VOCABULARY = "adapter.safetensors", "config.json", "vocabulary.safetensors"


@dataclass
class AdapterConfig:
    """What an adapter was made for; saved beside its weights.

    Args:
        target: name or path of the target model.
        target_revision: its revision on the hub, where it has one.
        target_hash: hash of those fields of the target's config that fix its computation.
        exit_layer: how many of the target's layers lie below the adapter.
        n_layers: how many layers the target has.
        parameters: trained parameters.
        vocabulary: how many of the most frequent tokens to draft from unless the drafter is told
            otherwise; None is all.
        training: provenance: data, schedule, held-out figures, versions, command.
    """

    target: str
    target_revision: str | None
    target_hash: str
    exit_layer: int
    n_layers: int
    parameters: int
    vocabulary: int | None = None
    training: dict[str, Any] = field(default_factory=dict)


class Adapter(nn.Module):
    """Attention and norms of the target's own classes: biases, GQA and RoPE follow the target."""

    def __init__(self, lm: LM, exit_layer: int):
        super().__init__()
        if not 0 < exit_layer < lm.n_layers:
            raise AdapterMismatch(
                f"exit layer {exit_layer} does not lie inside the target's {lm.n_layers} layers; "
                f"choose 1 to {lm.n_layers - 1}."
            )
        self.exit_layer = exit_layer
        layer = lm.layers[exit_layer]
        self.input_norm = type(layer.input_layernorm)(lm.config.hidden_size, lm.config.rms_norm_eps)
        self.attention = type(layer.self_attn)(lm.config, layer_idx=0)
        self.norm = type(layer.input_layernorm)(lm.config.hidden_size, lm.config.rms_norm_eps)

    def start_from(self, lm: LM) -> Adapter:
        """Copy the layer above the exit and, damped, the target's final norm.

        At full strength that norm makes the untrained adapter surely wrong: on SmolLM2 the loss
        starts at 18 nats, damped at 8, and 35 k tokens later it is 9.0 against 6.2.
        """
        layer = lm.layers[self.exit_layer]
        self.input_norm.load_state_dict(layer.input_layernorm.state_dict())
        self.attention.load_state_dict(layer.self_attn.state_dict())
        self.norm.load_state_dict(lm.hf.model.norm.state_dict())
        with torch.no_grad():
            self.norm.weight *= 0.3
        return self

    def forward(self, f_BND: Tensor, cache: KVCache | None, block: Block) -> Tensor:
        """The adapted state after its final norm, ready for the target's head.

        Args:
            f_BND: the target's hidden state after `exit_layer` layers.
            cache: the adapter's own cache of one layer; None in training.
        """
        attended_BND, _ = self.attention(
            hidden_states=self.input_norm(f_BND),
            position_embeddings=block.rope,
            attention_mask=block.bias_R1TE,
            past_key_values=cache.at(block) if cache is not None else None,
        )
        return self.norm(f_BND + attended_BND)


def target_hash(lm: LM) -> str:
    """Hash of the config fields that fix what the target computes, whatever else its file holds."""
    config = lm.config.to_dict()
    names = (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
        "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps",
        "tie_word_embeddings",
    )  # fmt: skip
    kept = {name: config.get(name) for name in names}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def describe(
    lm: LM, adapter: Adapter, training: dict[str, Any], vocabulary: int | None = None
) -> AdapterConfig:
    """The config of an adapter trained for `lm`."""
    return AdapterConfig(
        target=lm.name,
        target_revision=getattr(lm.config, "_commit_hash", None),
        target_hash=target_hash(lm),
        exit_layer=adapter.exit_layer,
        n_layers=lm.n_layers,
        parameters=sum(p.numel() for p in adapter.parameters()),
        vocabulary=vocabulary,
        training=training,
    )


def save(adapter: Adapter, config: AdapterConfig, frequent_K: Tensor, folder: Path) -> Path:
    """Write weights (bfloat16), config and vocabulary into `folder`, and return it.

    Args:
        frequent_K: token ids, the most frequent first: what a draft vocabulary is taken from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: t.to(torch.bfloat16).contiguous() for name, t in adapter.state_dict().items()}
    save_file(state, folder / WEIGHTS)
    save_file({"frequent": frequent_K.to(torch.int32)}, folder / VOCABULARY)
    (folder / CONFIG).write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    return folder


def find(path: str) -> Path:
    """The folder of an adapter: a local one, or a hub id that is downloaded.

    Errors: `AdapterNotFound` names what was tried and what to do.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(path, allow_patterns=[WEIGHTS, CONFIG, VOCABULARY]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise AdapterNotFound(
            f"no adapter at '{path}': it is not a folder, and the hub gave none ({error}). Train "
            "one (python train.py) or pass drafter.adapter= a folder or hub id."
        ) from error


def weights_hash(path: str) -> str:
    """Hash of an adapter's weights, wherever `path` leads."""
    return hashlib.sha256((find(path) / WEIGHTS).read_bytes()).hexdigest()[:16]


def draft_vocabulary(path: str, size: int) -> Tensor:
    """The `size` most frequent tokens of an adapter's training data, in ascending order.

    Errors: `AdapterNotFound` where the adapter came without them, `ConfigError` where there are
    fewer.
    """
    file = find(path) / VOCABULARY
    if not file.is_file():
        raise AdapterNotFound(
            f"adapter '{path}' has no {VOCABULARY}, so drafter.vocabulary={size} cannot be chosen "
            "from it. Leave it unset, or train the adapter again."
        )
    frequent_K = load_file(file)["frequent"].long()
    if not 0 < size <= len(frequent_K):
        raise ConfigError(
            f"drafter.vocabulary={size} must lie in 1 to {len(frequent_K)}, the distinct tokens "
            f"that adapter '{path}' was trained on."
        )
    return frequent_K[:size].sort().values


def load(path: str, lm: LM) -> tuple[Adapter, AdapterConfig]:
    """Load an adapter made for `lm`, in its dtype and on the device of its exit layer.

    Errors: `AdapterNotFound`, `CorruptFile`, and `AdapterMismatch` where it was trained for another
    model.
    """
    folder = find(path)
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            raise AdapterNotFound(f"'{folder}' holds no {name}; it is not an adapter's folder.")
    try:
        config = AdapterConfig(**json.loads((folder / CONFIG).read_text()))
        state = load_file(folder / WEIGHTS)
    except (ValueError, SafetensorError, TypeError) as error:  # no JSON, no text, wrong fields
        raise CorruptFile(
            f"adapter '{folder}' cannot be read ({error}); fetch it again."
        ) from error
    if config.n_layers != lm.n_layers or config.target_hash != target_hash(lm):
        raise AdapterMismatch(
            f"adapter '{path}' was trained for {config.target} (exit layer {config.exit_layer} of "
            f"{config.n_layers} layers, config {config.target_hash}); this target is "
            f"{lm.name} ({lm.n_layers} layers, config "
            f"{target_hash(lm)}). Pass drafter.adapter= one trained for it, or train one: "
            "python train.py model=..."
        )
    with torch.device("meta"):
        adapter = Adapter(lm, config.exit_layer)
    try:
        adapter.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise AdapterMismatch(f"adapter '{path}' does not fit this target: {error}") from error
    device = lm.layer_devices[config.exit_layer - 1]
    return adapter.to(device, lm.dtype).eval().requires_grad_(False), config
