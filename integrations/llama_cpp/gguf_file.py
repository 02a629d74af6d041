"""Writes a target as a GGUF file for llama.cpp, with its weights in their number format.

The file has no real tokenizer, since the benchmark exchanges token ids with llama.cpp.
"""

import hashlib
import logging
import os
import re
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import MissingPackage, UnsupportedModel
from kangaroo.utils.folders import cache_folder, install

log = logging.getLogger(__name__)

FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
ROPE_TYPES = ("default", "linear", "llama3")  # which scale each frequency by a factor
REVISION = 1  # to be raised when the same weights give a different file


def gguf_file(lm: TargetModel) -> Path:
    """The file of this target in the cache folder, written at first use. Its name has a hash of the
    weights and the config. Errors: `MissingPackage`; `UnsupportedModel` where llama.cpp's `llama`
    architecture does not compute what the target computes."""
    if find_spec("xllamacpp") is None:
        raise MissingPackage(f"llama.cpp needs xllamacpp: {install('benchmark')}.")
    check_convertible(lm)
    name = re.sub(r"[^\w.-]+", "-", lm.name)
    file = cache_folder() / "gguf" / f"{name}-{FORMATS[lm.dtype]}-{fingerprint(lm)}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        log.info("writing the target for llama.cpp, once: %s", file)
        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        write(lm, partial)
        os.replace(partial, file)
    return file


def check_convertible(lm: TargetModel) -> None:
    """Errors: `UnsupportedModel` names what llama.cpp would compute differently."""
    config, rope_type = lm.config, lm.config.rope_parameters["rope_type"]
    problems = {
        f"it is a {config.model_type} model": config.model_type != "llama",
        f"its activation is {config.hidden_act}": config.hidden_act != "silu",
        f"its RoPE is '{rope_type}'": rope_type not in ROPE_TYPES,
    }
    if reasons := [reason for reason, holds in problems.items() if holds]:
        raise UnsupportedModel(
            f"'{lm.name}' is not written for llama.cpp: {', '.join(reasons)}. That is done for "
            "Llama models alone."
        )


def fingerprint(lm: TargetModel) -> str:
    """A hash of the weights, the config and the file's format."""
    digest = hashlib.blake2b(f"{REVISION} {lm.config.to_json_string()}".encode(), digest_size=6)
    for name, weight in lm.hf.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def write(lm: TargetModel, file: Path) -> None:
    """Write the GGUF file."""
    config = lm.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    # Token 7 is written "7". Only this kind of tokenizer needs neither EOS nor merges.
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([str(token) for token in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    for name, weight in tensors(lm).items():
        llama_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if llama_name is None:
            raise UnsupportedModel(
                f"'{lm.name}' is not written for llama.cpp, which has no tensor '{name}' in its "
                "Llama models."
            )
        array, kind = as_stored(weight)
        writer.add_tensor(llama_name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(lm: TargetModel) -> dict[str, Tensor]:
    """The file's tensors by transformers' names: a tied head only once, and RoPE's scaling."""
    config, weights = lm.config, dict(lm.hf.state_dict())
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    for name, part in product(weights, heads):
        if part in name:
            weights[name] = rotated_in_pairs(weights[name], heads[part])
    if config.rope_parameters["rope_type"] != "default":
        scaled = dict(lm.hf.named_buffers())["model.rotary_emb.inv_freq"].double()
        exponents = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
        weights["rope_freqs.weight"] = (config.rope_parameters["rope_theta"] ** -exponents) / scaled
    return weights


def rotated_in_pairs(weight: Tensor, heads: int) -> Tensor:
    """A query or key projection for llama.cpp, whose RoPE rotates neighbours (2i, 2i + 1),
    where transformers rotates halves (i, i + size/2) of a head."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def as_stored(weight: Tensor) -> tuple[np.ndarray, Any]:
    """A weight as an array and its GGUF type; llama.cpp takes norms and biases in float32."""
    if weight.ndim == 1:
        return weight.float().numpy(), gguf.GGMLQuantizationType.F32
    stored = gguf.GGMLQuantizationType[FORMATS[weight.dtype].upper()]
    if weight.dtype is torch.bfloat16:  # NumPy has no such type: its bytes
        return weight.contiguous().view(torch.uint8).numpy(), stored
    return weight.contiguous().numpy(), stored
