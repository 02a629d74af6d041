"""Models from GGUF files, whose matrices stay packed or are widened once.

Shapes: O rows of a matrix (outputs), B bytes of a row, F frequencies of RoPE.
"""

import logging
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers import PretrainedConfig as Config

from kangaroo.models.gguf_file import GGUFFile
from kangaroo.models.packed import PackedEmbedding, PackedLinear, PackedMatrix
from kangaroo.models.supported import check_supported
from kangaroo.utils.errors import UnsupportedModel, explained

READ = "llama", "qwen2", "qwen3"  # architectures read here; others are left to transformers
PACKABLE = {  # formats that may stay packed, since native code multiplies them as they lie
    *(Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS),
}
TABLE = "token_embd.weight"
HEAD = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
# How Llama 3 scales RoPE, besides the factor, which is all that a file says of it.
LLAMA_3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

log = logging.getLogger(__name__)


def read_config(file: GGUFFile) -> Config:
    """The config of the model in a file. Errors: `UnsupportedModel`, `CorruptFile`."""
    if file.architecture not in READ:
        return _left_to_transformers(file, AutoConfig)
    heads = file.field("attention.head_count")
    key_heads = file.field("attention.head_count_kv", 0)
    hidden = file.field("embedding_length")
    head_size = file.field("attention.key_length", 0)
    if not all(isinstance(x, int) for x in (heads, key_heads, hidden, head_size)):
        raise UnsupportedModel(
            f"the layers of '{file.path}' have different shapes (attention.head_count is a list). "
            "Pass model= another file."
        )
    if TABLE not in file.tensors:
        raise file.damage(f"it lacks the weight '{TABLE}'")
    fields: dict[str, Any] = {
        "vocab_size": file.tensors[TABLE].shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.field("feed_forward_length"),
        "num_hidden_layers": file.field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads or heads,
        "max_position_embeddings": file.field("context_length"),
        "rms_norm_eps": file.field("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file),
        "tie_word_embeddings": HEAD not in file.tensors,
    }
    if head_size and (head_size != hidden // heads or file.architecture == "qwen3"):
        fields["head_dim"] = head_size
    for name in ("bos", "eos", "padding"):
        token = file.fields.get(f"tokenizer.ggml.{name}_token_id")
        fields[f"{name.removesuffix('ding')}_token_id"] = token
    config = AutoConfig.for_model(file.architecture, **fields)
    config.name_or_path = str(file.path)
    return config


def _rope(file: GGUFFile) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": file.field("rope.freq_base", 10000.0)}
    kind = file.field("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return rope | LLAMA_3 | {"factor": round(_numbers(file, ROPE_FACTORS).max().item(), 3)}
    if kind == "none":
        return rope
    rope |= {"rope_type": kind, "factor": file.field("rope.scaling.factor")}
    if kind != "linear":
        length = file.field("rope.scaling.original_context_length", 0)
        rope["original_max_position_embeddings"] = length or file.field("context_length")
    return rope


def read_model(file: GGUFFile, dtype: torch.dtype, packed: bool) -> PreTrainedModel:
    """The model in a file, on the CPU, with states in `dtype`.

    Args:
        packed: keep matrices as they lie in the file, if their format is in `PACKABLE`.

    Errors: `UnsupportedModel`, `CorruptFile`.
    """
    if file.architecture not in READ:
        if packed:
            reason = f"only {', '.join(READ)} models stay packed"
            log.warning(f"'{file.path}' is widened to {dtype}: {reason}")
        return _left_to_transformers(
            file, AutoModelForCausalLM, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
    config = read_config(file)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rope = model.model.rotary_emb = type(model.model.rotary_emb)(config)
    _check_rope(file, rope.inv_freq)
    _fill(file, model, dtype, packed)
    if config.tie_word_embeddings and not isinstance(model.model.embed_tokens, PackedMatrix):
        model.tie_weights()
    names = ("eos", "eot", "eom")  # all of them end a text
    ends = [file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    model.generation_config.eos_token_id = [*dict.fromkeys(x for x in ends if x is not None)]
    return model


def _fill(file: GGUFFile, model: Any, dtype: torch.dtype, packed: bool) -> None:
    """Put the file's weights into a model on the meta device. Warns of matrices that do not stay
    packed. Errors: `UnsupportedModel` for weights without a place in the model; `CorruptFile`."""
    architecture = next(x for x, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    unused = {*file.tensors} - {ROPE_FACTORS}
    widened = 0
    for name, module in [*model.named_modules()]:
        if "weight" not in module._parameters:
            continue
        place = names.get_name(name)
        stored_name = f"{place}.weight"
        if stored_name == HEAD and HEAD not in file.tensors:
            stored_name = TABLE
        blocks_OB = file.blocks(stored_name)
        stored = file.tensors[stored_name]
        shape = tuple(module.weight.shape)
        if stored.shape != shape:
            raise file.damage(
                f"the weight '{stored_name}' has the shape {[*stored.shape]}, but by its metadata "
                f"it would be {[*shape]}"
            )
        order = _order(file, name, stored.shape[0])
        blocks_OB = blocks_OB[order]
        bias = None
        unused -= {stored_name}
        if module._parameters.get("bias") is not None:
            bias = nn.Parameter(_numbers(file, f"{place}.bias").to(dtype)[order])
            unused -= {f"{place}.bias"}
        if packed and len(shape) == 2 and stored.kind in PACKABLE:
            if isinstance(module, nn.Embedding):
                new: nn.Module = PackedEmbedding(blocks_OB, stored.kind, dtype)
            else:
                new = PackedLinear(blocks_OB, stored.kind, dtype, bias)
            model.set_submodule(name, new)
            continue
        widened += len(shape) == 2
        module.weight = nn.Parameter(_widened(file, blocks_OB, stored.kind, dtype).view(shape))
        if bias is not None:
            module.bias = bias
    if unused:
        raise UnsupportedModel(
            f"'{file.path}' has {len(unused)} weights that a {file.architecture} model here has no "
            f"place for, such as '{min(unused)}'. Pass model= another one."
        )
    if packed and widened:
        log.warning(
            f"{widened} matrices of '{file.path}' are of types that do not stay packed, and are "
            f"widened to {dtype}"
        )


def _order(file: GGUFFile, name: str, n_rows: int) -> Tensor | slice:
    """An index that puts the file's rows in transformers' order. In llama files the rows of queries
    and keys are permuted within each head, since llama.cpp rotates neighbours."""
    if file.architecture != "llama" or not name.endswith(("q_proj", "k_proj")):
        return slice(None)
    heads = file.field("attention.head_count")
    if name.endswith("k_proj"):
        heads = file.field("attention.head_count_kv", heads)
    return torch.arange(n_rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _numbers(file: GGUFFile, name: str) -> Tensor:
    """A vector of a file in float32."""
    return _widened(file, file.blocks(name), file.tensors[name].kind, torch.float32).flatten()


def _widened(file: GGUFFile, blocks_OB: Tensor, kind: Kind, dtype: torch.dtype) -> Tensor:
    try:
        return PackedMatrix(blocks_OB, kind, dtype).widened()
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"'{file.path}' holds weights of type {kind.name}, which the package gguf cannot "
            "widen. Pass model= a file of other types (Q4_K_M, Q8_0)."
        ) from error


def _check_rope(file: GGUFFile, frequencies_F: Tensor) -> None:
    """Raise `UnsupportedModel` if the file's factors of RoPE are not those of Llama 3."""
    if ROPE_FACTORS not in file.tensors:
        return
    plain_F = file.field("rope.freq_base", 10000.0) ** -torch.linspace(0, 1, len(frequencies_F) + 1)
    expected_F = plain_F[:-1] / _numbers(file, ROPE_FACTORS)
    if not torch.allclose(frequencies_F, expected_F, rtol=1e-3):
        raise UnsupportedModel(
            f"'{file.path}' scales RoPE in another way than Llama 3 ({ROPE_FACTORS}). Pass model= "
            "another file."
        )


def _left_to_transformers(file: GGUFFile, kind: Any, **options: Any) -> Any:
    """What transformers reads from a file of an architecture that is not in `READ`."""
    problem = f"'{file.path}' is a {file.architecture} model, which cannot be read from a GGUF file"
    fix = f"Pass model= a file of {', '.join(READ)}, or one that transformers reads."
    causes = (ValueError, NotImplementedError, KeyError, TypeError)
    with explained(UnsupportedModel, problem, fix, causes):
        read = kind.from_pretrained(file.path.parent, gguf_file=file.path.name, **options)
        check_supported(read if isinstance(read, Config) else read.config)
    return read
