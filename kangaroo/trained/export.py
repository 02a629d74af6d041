"""A drafter as an ordinary transformers model, for engines that know nothing of adapters.

The target's layers below the exit and, as one more layer, the adapter: what `generate` takes as
`assistant_model`. It shares the target's weights in memory.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kangaroo.errors import ConfigError
from kangaroo.model import LM
from kangaroo.trained.adapter import Adapter

# the adapter's parts by the names they have in a layer of a Llama-like model
IN_A_LAYER = {
    "input_norm": "input_layernorm",
    "attention": "self_attn",
    "middle_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
}


def draft_model(lm: LM, adapter: Adapter) -> PreTrainedModel:
    """The model whose logits are the adapter's over the whole vocabulary.

    Errors: `ConfigError` for an adapter that is no layer: a fused one, or one without attention.
    """
    parts = adapter.architecture
    if parts.fused or not parts.attention:
        raise ConfigError(
            "only an adapter of attention, with or without a feed-forward part, is a layer of a "
            "transformers model; this one is fused or has no attention."
        )
    state = shallow_state(lm, adapter.exit_layer)
    own = adapter.state_dict()
    layer = f"model.layers.{adapter.exit_layer}."
    for name, weight in own.items():
        part, _, rest = name.partition(".")
        if part in IN_A_LAYER:
            state[f"{layer}{IN_A_LAYER[part]}.{rest}"] = weight
    if not parts.feed_forward:  # one that adds nothing
        above = lm.hf.state_dict()
        for name in [name for name in above if name.startswith(layer)]:
            state.setdefault(name, torch.zeros_like(above[name]))
    state["model.norm.weight"] = own["norm.weight"]
    if adapter.head is not None:
        state["lm_head.weight"] = own["head.weight"]
    return _model(lm, adapter.exit_layer + 1, state)


def truncated(lm: LM, layers: int) -> PreTrainedModel:
    """The target's first layers with its own norm and head: a draft that nobody trained."""
    state = shallow_state(lm, layers)
    state["model.norm.weight"] = lm.hf.state_dict()["model.norm.weight"]
    return _model(lm, layers, state)


def shallow_state(lm: LM, layers: int) -> dict[str, Tensor]:
    """Embeddings, head and the first layers, by the names that transformers gives them."""
    wanted = ("model.embed_tokens.", "lm_head.", *(f"model.layers.{i}." for i in range(layers)))
    return {name: w for name, w in lm.hf.state_dict().items() if name.startswith(wanted)}


def _model(lm: LM, layers: int, state: dict[str, Tensor]) -> PreTrainedModel:
    config: Any = deepcopy(lm.config)
    config.num_hidden_layers = layers
    config.tie_word_embeddings = False  # the weights are given; tied ones are given twice
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=lm.dtype
    )
    model.load_state_dict(state, strict=True, assign=True)
    model.generation_config = deepcopy(lm.hf.generation_config)
    # what is not in the state, such as the frequencies of positions, was made on the CPU
    return model.eval().requires_grad_(False).to(lm.device)
