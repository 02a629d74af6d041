"""Targets whose shape is known without the hub, with all else that their computation depends on."""

from __future__ import annotations

from typing import Any

from kangaroo.models.embedded import EMBEDDED

SMALL = "small:"


_SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
_SIZES += ["num_attention_heads", "num_key_value_heads", "max_position_embeddings"]


def _shape(model_type: str, *sizes: int, **others: Any) -> dict[str, Any]:
    return {"model_type": model_type} | dict(zip(_SIZES, sizes, strict=True)) | others


# From the config.json of each checkpoint on the hub (some are gated): what differs from the values
# that transformers takes for that type of model. An adapter that is made from this table alone has
# to fit the real target (`adapter_files.target_hash`).
_VICUNA_7B = _shape("llama", 32000, 4096, 11008, 32, 32, 32, 2048)
_VICUNA_13B = _shape("llama", 32000, 5120, 13824, 40, 40, 40, 2048)
_SMOLLM2 = {
    "tie_word_embeddings": True,
    "rms_norm_eps": 9.999999747378752e-06,  # 1e-5 in float32, as its GGUF holds it
    "rope_theta": 100000.0,
}
_MISTRAL = {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0}
_LLAMA_2 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def _llama_3(factor: float) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": scaling}


SHAPES = {
    EMBEDDED: _shape("llama", 49152, 576, 1536, 30, 9, 3, 8192, **_SMOLLM2),
    "lmsys/vicuna-7b-v1.3": _VICUNA_7B,
    "lmsys/vicuna-13b-v1.3": _VICUNA_13B,
    "lmsys/vicuna-33b-v1.3": _shape("llama", 32000, 6656, 17920, 60, 52, 52, 2048),
    "meta-llama/Llama-2-7b-chat-hf": _VICUNA_7B | _LLAMA_2,
    "meta-llama/Llama-2-13b-chat-hf": _VICUNA_13B | _LLAMA_2,
    "facebook/layerskip-llama2-7B": _VICUNA_7B | _LLAMA_2,
    "meta-llama/Llama-3.2-1B-Instruct": _shape(
        "llama", 128256, 2048, 8192, 16, 32, 8, 131072, tie_word_embeddings=True, **_llama_3(32.0)
    ),
    "meta-llama/Llama-3.1-8B-Instruct": _shape(
        "llama", 128256, 4096, 14336, 32, 32, 8, 131072, **_llama_3(8.0)
    ),
    "meta-llama/Llama-3.1-70B-Instruct": _shape(
        "llama", 128256, 8192, 28672, 80, 64, 8, 131072, **_llama_3(8.0)
    ),
    "Qwen/Qwen2.5-7B-Instruct": _shape(
        "qwen2", 152064, 3584, 18944, 28, 28, 4, 32768, rope_theta=1000000.0
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": _shape(
        "mistral", 32768, 4096, 14336, 32, 32, 8, 32768, **_MISTRAL
    ),
}


def shape_of(path: str) -> dict[str, Any] | None:
    """The fields of transformers' config for the model of that name; None for an unknown one.

    After `small:` the sizes are small; family, groups of heads and context stay.
    """
    shape = SHAPES.get(path.removeprefix(SMALL))
    if shape is None or not path.startswith(SMALL):
        return shape
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    kv_small = 2 if heads > kv_heads else 4
    heads_small = kv_small * heads // kv_heads
    return shape | {
        "vocab_size": 259,  # that of `models.byte_tokenizer`
        "hidden_size": 16 * heads_small,
        "intermediate_size": 32 * heads_small,
        "num_hidden_layers": 6,
        "num_attention_heads": heads_small,
        "num_key_value_heads": kv_small,
    }
