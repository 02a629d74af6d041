"""Hashes of what a target computes, by which an adapter recognises its target."""

import hashlib
import json
from itertools import product

import numpy as np
from transformers import PretrainedConfig

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
