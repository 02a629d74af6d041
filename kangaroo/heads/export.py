"""A drafter as an ordinary transformers model, for software that knows nothing of adapters.

The target's layers below the exit and the adapter above them, a layer for each of its attention
layers: what vLLM calls a draft model, SGLang a standalone one, and transformers an assistant. In
memory it shares the target's weights; on disk it is complete.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from kangaroo.heads import adapter_files, base
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.models import loading as models
from kangaroo.models.loading import ModelConfig
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import new_folder


def check(parts: base.HeadConfig, vocabulary: int | None, name: str) -> None:
    """Raise `ConfigError` for what is no layer on the target's first ones.

    Args:
        vocabulary: how many tokens it drafts from; None is all.
        name: what the message calls it.
    """
    if not isinstance(parts, AdapterHeadConfig):
        reason = f"it is a trained {parts.kind()}, which reads the target's final states"
    elif parts.fused:
        reason = "it is fused: it reads deep states of the target"
    elif parts.own_head and vocabulary:
        reason = f"its own head knows {vocabulary} tokens, and a model's head needs all of them"
    else:
        return
    raise ConfigError(
        f"{name} cannot become a draft model: {reason}. Export one of adapter=attention, "
        "layer, mlp, or own_head with trainer.vocabulary=null; or decode with this one here "
        f"(drafter={parts.drafter})."
    )


def save(path: str, model: ModelConfig, folder: Path) -> None:
    """Write the adapter at `path` with the layers of its target below it, and the tokenizer, as a
    checkpoint that transformers loads.

    It drafts from the whole vocabulary, whatever the adapter does.

    Errors: `ConfigError` for an adapter that is no layer, or a folder that is there already; those
    of `models.load` and of `adapter_files.load`.
    """
    about = adapter_files.read_config(path)
    check(about.architecture, about.vocabulary, f"adapter '{path}'")
    # nothing is computed: the checkpoint's files are mapped, and most of them is never read
    hf, tokenizer = models.load(replace(model, device="cpu", device_map=None))
    lm = TargetModel(hf)
    adapter, _ = adapter_files.load(path, lm, Adapter, vocabulary=0)
    with new_folder(folder) as partial:
        draft_model(lm, adapter).save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def draft_model(lm: TargetModel, adapter: Adapter) -> PreTrainedModel:
    """The model whose logits are the adapter's over the whole vocabulary.

    Errors: `ConfigError` for an adapter that is no layer.
    """
    weights = adapter.state_dict()
    head = weights.get("head.weight")
    partial = None if head is None or len(head) == lm.config.vocab_size else len(head)
    check(adapter.architecture, partial, "this adapter")
    state = shallow_state(lm, adapter.exit_layer) | layer_state(lm, adapter)
    state["model.norm.weight"] = weights["norm.weight"]
    if head is not None:
        state["lm_head.weight"] = head
    return _model(lm, adapter.exit_layer + adapter.depth, state, own_head=head is not None)


def layer_state(lm: TargetModel, adapter: Adapter) -> dict[str, Tensor]:
    """The adapter's layers, by the names that transformers gives those above the exit."""
    first, last = adapter.exit_layer, adapter.exit_layer + adapter.depth - 1
    state = {  # a part that the adapter does not have adds nothing
        f"model.layers.{layer}.{name}": torch.zeros_like(weight)
        for layer in range(first, last + 1)
        for name, weight in lm.layers[first].state_dict().items()
    }
    parts = {
        f"{last}.post_attention_layernorm": adapter.middle_norm,
        f"{last}.mlp": adapter.feed_forward,
    }
    for layer, (norm, attention) in enumerate(adapter.attentions, first):
        parts |= {f"{layer}.input_layernorm": norm, f"{layer}.self_attn": attention}
    for name, part in parts.items():
        if part is not None:
            state |= part.state_dict(prefix=f"model.layers.{name}.")
    return state


def truncated(lm: TargetModel, layers: int) -> PreTrainedModel:
    """The target's first layers with its own norm and head: a draft that nobody trained."""
    state = shallow_state(lm, layers)
    state["model.norm.weight"] = lm.hf.state_dict()["model.norm.weight"]
    return _model(lm, layers, state)


def shallow_state(lm: TargetModel, layers: int) -> dict[str, Tensor]:
    """Embeddings, head and the first layers, by the names that transformers gives them."""
    wanted = ("model.embed_tokens.", "lm_head.", *(f"model.layers.{i}." for i in range(layers)))
    return {name: w for name, w in lm.hf.state_dict().items() if name.startswith(wanted)}


def _model(
    lm: TargetModel, layers: int, state: dict[str, Tensor], own_head: bool = False
) -> PreTrainedModel:
    config: Any = deepcopy(lm.config)
    config.num_hidden_layers = layers
    if own_head:  # of the target's, the config knows whether it is tied
        config.tie_word_embeddings = False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * layers  # all of full attention
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=lm.dtype
    )
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    # The target's special tokens. How the target samples is not the draft's matter, and what some
    # checkpoints say of it transformers refuses to save.
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ends = {name: getattr(lm.hf.generation_config, name) for name in names}
    model.generation_config = GenerationConfig(**ends)
    # what is not in the state, such as the frequencies of positions, was made on the CPU
    return model.eval().requires_grad_(False).to(lm.device)
