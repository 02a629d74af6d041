"""The weights of a decoder layer, found by the names that transformers gives them."""

import hashlib
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kangaroo.cpu.native import LayerWeights
from kangaroo.models.supported import PLAIN, window_of

FINGERPRINTED = 256  # numbers of each weight
FORMATS = torch.float32, torch.bfloat16, torch.float16  # in which weights are multiplied


def layer_weights(layer: Any) -> LayerWeights:
    """What native code reads of a transformers layer."""
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight,
        feed_forward_norm=layer.post_attention_layernorm.weight,
        **attention_weights(layer.self_attn),
        **feed_forward_weights(layer.mlp),
    )


def can_record(hf: PreTrainedModel) -> bool:
    """Whether a step may be recorded as a CUDA graph: not where experts or linear layers of another
    library may wait for the host."""
    packed = packed_linears(hf).values()
    foreign = any(type(linear) is not nn.Linear or "forward" in vars(linear) for linear in packed)
    return not foreign and not has_experts(hf)


def has_experts(hf: PreTrainedModel) -> bool:
    """Whether it is a mixture of experts."""
    return any(hasattr(layer.mlp, "experts") for layer in hf.model.layers)


def norms_before(layer: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms before a layer's attention and its feed-forward part. OLMo 2 has none there, and
    Llama's `post_attention_layernorm` is another one in Gemma."""
    norms = dict(layer.named_children())
    if "input_layernorm" not in norms:
        return None, None
    after_attention = norms["post_attention_layernorm"]
    return norms["input_layernorm"], norms.get("pre_feedforward_layernorm", after_attention)


def packed_linears(module: nn.Module) -> dict[str, nn.Module]:
    """By name, the linear layers whose weights do not lie as they are multiplied: quantized."""

    def holds_weight(linear: nn.Module) -> bool:
        weight = getattr(linear, "weight", None)
        in_place = type(linear) is nn.Linear and "forward" not in vars(linear)
        return in_place and type(weight) is nn.Parameter and weight.dtype in FORMATS

    linears = {name: part for name, part in module.named_modules() if hasattr(part, "in_features")}
    return {name: part for name, part in linears.items() if not holds_weight(part)}


@torch.no_grad()
def copy_weights(part: nn.Module, theirs: nn.Module, dtype: torch.dtype) -> None:
    """Give a part of a head the weights of the target's; of a quantized one those that it
    multiplies with, whatever its format: they are its products with unit vectors."""
    packed = packed_linears(theirs)
    inside = tuple(f"{name}." for name in packed)
    state = {k: x for k, x in theirs.state_dict().items() if not inside or not k.startswith(inside)}
    for name, linear in packed.items():
        tensors = chain(linear.parameters(), linear.buffers())
        size: Any = linear.in_features
        units_1II = torch.eye(size, dtype=dtype, device=next(tensors).device)[None]
        products_IO, bias_O = linear(units_1II)[0], getattr(linear, "bias", None)
        if bias_O is not None:
            state[f"{name}.bias"], products_IO = bias_O, products_IO - bias_O
        state[f"{name}.weight"] = products_IO.T
    part.load_state_dict(state)


def attention_weights(attention: nn.Module) -> dict[str, Tensor | None]:
    """Biases (Qwen2) and norms of queries and keys (Qwen3) where the architecture has them."""
    weights: dict[str, Tensor | None] = {}
    for name in "qkvo":
        linear = getattr(attention, f"{name}_proj")
        weights |= {name: linear.weight, f"{name}_bias": linear.bias}
    norms = {name: getattr(attention, name, None) for name in ("q_norm", "k_norm")}
    return weights | {name: norm and norm.weight for name, norm in norms.items()}


def feed_forward_weights(feed_forward: nn.Module) -> dict[str, Tensor | None]:
    """What native code reads of a feed-forward part."""
    return {name: getattr(feed_forward, f"{name}_proj").weight for name in ("gate", "up", "down")}


def is_plain(hf: PreTrainedModel) -> bool:
    """Whether a model computes what its weights say: of a family that native code knows, without
    hooks, windows, layers without rotation (SmolLM3's), further weights (LoRA's), in one dtype."""
    if hf.config.model_type not in PLAIN or window_of(hf.config)[0] or packed_linears(hf):
        return False
    if not all(getattr(layer.self_attn, "use_rope", True) for layer in hf.model.layers):
        return False
    for module in hf.modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return False
    weights = [hf.model.embed_tokens.weight, hf.model.norm.weight, hf.lm_head.weight]
    for layer in map(layer_weights, hf.model.layers):
        weights += [weight for weight in vars(layer).values() if weight is not None]
    dtype = hf.lm_head.weight.dtype
    fitting = all(weight.dtype == dtype and weight.is_contiguous() for weight in weights)
    return fitting and set(map(id, weights)) == set(map(id, hf.parameters()))


def fingerprint(model: nn.Module) -> str | None:
    """Tells a model's weights from others of the same shape by the first numbers of each, rounded
    to bfloat16: a checkpoint's is the same in any number format (but for one of float32 in float16,
    which rounds twice). None for a `meta_model`, which has no weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.is_meta:
            return None
        if type(parameter) is not nn.Parameter:  # packed, in a format of its own
            continue
        first = parameter.detach().flatten()[:FINGERPRINTED].bfloat16().cpu()
        first = first.masked_fill(first.abs() < 2**-16, 0)  # not exact in float16
        digest.update(first.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
