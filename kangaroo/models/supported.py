"""What a model's config says: whether the engine can run it, its windows, context, ends and
hash."""

import hashlib
import json
from collections.abc import Sequence
from copy import deepcopy
from itertools import product
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedModel

from kangaroo.utils.errors import UnsupportedModel

PLAIN = ("llama", "mistral", "qwen2", "qwen3", "smollm3")  # run by native code and kernels
BY_MODULES = ("gemma2", "gemma3_text", "granite", "mixtral", "olmo2", "olmo3", "phi3", "qwen3_moe")
SUPPORTED = (*PLAIN, *BY_MODULES)
FIXES = {"gemma3": "Pass a checkpoint of its text model alone (a gemma3_text model)."}
UNIFORM = ("mistral", "mixtral", "phi3", "qwen3_moe")  # all layers have the window, or none has
FULL = "full_attention"  # a layer's type in configs
WINDOWED = "sliding_attention"
# Fields of a target's config that determine what it computes, in all families and in some.
HASHED = """
    model_type hidden_size intermediate_size num_hidden_layers vocab_size num_attention_heads
    num_key_value_heads head_dim rope_parameters rms_norm_eps tie_word_embeddings
""".split()
HASHED_IF_SET = """
    sliding_window query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping
    embedding_multiplier residual_multiplier attention_multiplier logits_scaling
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size no_rope_layers
""".split()


def check_supported(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModel` for a model whose layers or positions the engine cannot run."""
    name = config.name_or_path or config.model_type
    if config.model_type not in SUPPORTED:
        raise UnsupportedModel(
            f"'{name}' is a {config.model_type} model; supported are {', '.join(SUPPORTED)}. "
            f"{FIXES.get(config.model_type, 'Choose another model.path.')}"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel(
            f"'{name}' attends to later tokens, too (use_bidirectional_attention): it is made to "
            "embed texts, not to write them. Pass a model that writes."
        )
    for rope in ropes(config):
        rope_type = rope["rope_type"]
        part = rope.get("partial_rotary_factor", 1.0)
        if rope_type in ("dynamic", "longrope"):
            raise UnsupportedModel(
                f"'{name}' uses '{rope_type}' RoPE, whose frequencies change with the length of "
                "the text, so cached keys would not fit. Pass a model whose RoPE is default, "
                "linear, llama3 or yarn."
            )
        if rope_type != "default" and part != 1.0:  # the default type ignores it
            raise UnsupportedModel(
                f"'{name}' has partial_rotary_factor={part} with '{rope_type}' RoPE, but a "
                f"{config.model_type} model rotates whole heads. Leave it out of config.json, if "
                "the model was trained without."
            )


def windows(config: PretrainedConfig) -> tuple[int | None, list[bool]]:
    """The size of the sliding window in tokens, the current one included, and for each layer
    whether it has the window. The size is None if no text can outgrow it."""
    window = getattr(config, "sliding_window", None)
    longest = context(config)
    kinds = None if config.model_type in UNIFORM else getattr(config, "layer_types", None)
    windowed = [kind == WINDOWED for kind in kinds or [WINDOWED if window else FULL]]
    if not any(windowed) or ((window or longest) >= longest and len(ropes(config)) == 1):
        return None, [False] * config.num_hidden_layers
    return window or longest, windowed if kinds else windowed * config.num_hidden_layers


def context(config: PretrainedConfig) -> int:
    """The most positions that the model is made for. `max_position_embeddings` mostly is this
    length. Sometimes it is still the one before RoPE was scaled: with YaRN as in Qwen's model
    cards, and in the long versions of Vicuna, which have a field of their own for the length."""
    longest = max(config.max_position_embeddings, getattr(config, "max_sequence_length", None) or 0)
    for rope in ropes(config):
        rope_type = rope["rope_type"]
        factor = rope.get("factor")
        unscaled = rope.get("original_max_position_embeddings")
        if rope_type == "yarn" and factor:
            longest = max(longest, int(factor * (unscaled or longest)))
        elif rope_type != "default" and factor and longest <= (unscaled or 0):
            longest = int(factor * longest)
    return longest


def ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters of each type of layer; a single one if all types share it."""
    parameters = config.rope_parameters
    return [parameters] if "rope_type" in parameters else list(parameters.values())


def with_layers(config: PretrainedConfig, layers: Sequence[int]) -> Any:
    """The config of a model made of these layers, each with its window, its RoPE (SmolLM3) and its
    experts (Qwen3-MoE)."""
    changed: Any = deepcopy(config)
    changed.num_hidden_layers = len(layers)
    for name in ("layer_types", "no_rope_layers"):
        if by_layer := getattr(config, name, None):
            setattr(changed, name, [by_layer[layer] for layer in layers])
    if hasattr(config, "mlp_only_layers"):
        changed.mlp_only_layers = [
            place
            for place, layer in enumerate(layers)
            if layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step > 0
        ]
        changed.decoder_sparse_step = 1
    return changed


def usual_attention(hf: PreTrainedModel) -> str:
    """The attention for transformers' own generation: that of torch, if the model supports it."""
    return "sdpa" if hf._supports_sdpa else "eager"


def eos_ids(config: PretrainedConfig, eos: int | list[int] | None) -> list[int]:
    """The tokens that end a text: `eos` of the generation config, which may be several (Llama 3),
    or else those of the config. An id outside the vocabulary, such as -1, ends none."""
    eos = config.eos_token_id if eos is None else eos
    ids = [] if eos is None else [eos] if isinstance(eos, int) else eos
    return [i for i in ids if 0 <= i < config.vocab_size]


def target_hashes(config: PretrainedConfig) -> list[str]:
    """Hashes of the config fields that determine what a target computes. New adapters get the first
    one, and any of them fits: the hub's checkpoint and the GGUF files of a model differ in whether
    the head is tied, and in how they write two of the numbers."""
    values = config.to_dict()
    hashes = []
    rope = values["rope_parameters"]
    eps = np.float32(values["rms_norm_eps"])
    kinds = (float, int) if "rope_theta" in rope else ()
    thetas = [{"rope_theta": kind(rope["rope_theta"])} for kind in kinds] or [{}]
    for tied, epsilon, theta in product((True, False), (float(eps), float(str(eps))), thetas):
        values |= {"tie_word_embeddings": tied, "rms_norm_eps": epsilon}
        values["rope_parameters"] = rope | theta
        fields = {name: values.get(name) for name in HASHED}
        fields |= {name: values[name] for name in HASHED_IF_SET if values.get(name) is not None}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
        hashes.append(digest[:16])
    return hashes
