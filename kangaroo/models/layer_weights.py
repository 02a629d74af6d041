"""The weights of a decoder layer, found by the names that transformers gives them."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kangaroo.engine.backend import LayerWeights, Matrix
from kangaroo.models.packed import PackedLinear, PackedMatrix, device_of
from kangaroo.models.supported import PLAIN, windows

FINGERPRINTED = 256  # numbers per weight
FORMATS = torch.float32, torch.bfloat16, torch.float16  # of weights that are not packed


def layer_weights(layer: Any) -> LayerWeights[Matrix]:
    """The weights of a transformers layer, for native code and kernels."""
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight,
        feed_forward_norm=layer.post_attention_layernorm.weight,
        **attention_weights(layer.self_attn),
        **feed_forward_weights(layer.mlp),
    )


def can_record(hf: PreTrainedModel) -> bool:
    """Whether CUDA graphs can record it. Experts and other libraries' linear layers may sync."""
    linears = packed_linears(hf).values()
    plain = all(type(linear) is nn.Linear and "forward" not in vars(linear) for linear in linears)
    return plain and not has_experts(hf)


def has_experts(hf: PreTrainedModel) -> bool:
    """Whether the model is a mixture of experts."""
    return any(hasattr(layer.mlp, "experts") for layer in hf.model.layers)


def norms_before(layer: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms before a layer's attention and before its feed-forward part. OLMo 2 has neither; in
    Gemma `post_attention_layernorm` is another norm than in Llama."""
    norms = dict(layer.named_children())
    if "input_layernorm" not in norms:
        return None, None
    after_attention = norms["post_attention_layernorm"]
    return norms["input_layernorm"], norms.get("pre_feedforward_layernorm", after_attention)


def packed_linears(module: nn.Module) -> dict[str, Any]:
    """The quantized linear layers by name: those whose weights are no plain tensors of numbers."""

    def is_plain_linear(linear: nn.Module) -> bool:
        weight = getattr(linear, "weight", None)
        is_linear = type(linear) is nn.Linear and "forward" not in vars(linear)
        return is_linear and type(weight) is nn.Parameter and weight.dtype in FORMATS

    linears = {name: part for name, part in module.named_modules() if hasattr(part, "in_features")}
    return {name: part for name, part in linears.items() if not is_plain_linear(part)}


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module, dtype: torch.dtype) -> None:
    """Load the weights of `source`, a part of the target, into a part of a head. Quantized ones of
    any format are dequantized: multiplied by unit vectors."""
    packed = packed_linears(source)
    prefixes = tuple(f"{name}." for name in packed)
    state = {k: x for k, x in source.state_dict().items() if not k.startswith(prefixes)}
    for name, linear in packed.items():
        bias_O = getattr(linear, "bias", None)
        if isinstance(linear, PackedLinear):
            weight_OI = linear.widened()
        else:
            identity_II = torch.eye(linear.in_features, dtype=dtype, device=device_of(linear))
            products_IO = linear(identity_II[None])[0]
            weight_OI = (products_IO if bias_O is None else products_IO - bias_O).T
        state[f"{name}.weight"] = weight_OI
        if bias_O is not None:
            state[f"{name}.bias"] = bias_O
    target.load_state_dict(state)


def matrix_of(linear: nn.Module) -> Matrix:
    """The weight of a linear layer or an embedding; a packed module is its own matrix."""
    return linear if isinstance(linear, PackedMatrix) else linear.get_parameter("weight")


def attention_weights(attention: nn.Module) -> dict[str, Any]:
    """The weights of an attention part, with its biases (Qwen2) and query and key norms (Qwen3)."""
    weights: dict[str, Any] = {}
    for name in "qkvo":
        linear = getattr(attention, f"{name}_proj")
        weights |= {name: matrix_of(linear), f"{name}_bias": linear.bias}
    norms = {name: getattr(attention, name, None) for name in ("q_norm", "k_norm")}
    return weights | {name: norm and norm.weight for name, norm in norms.items()}


def feed_forward_weights(feed_forward: nn.Module) -> dict[str, Any]:
    """The weights of a feed-forward part."""
    return {x: matrix_of(getattr(feed_forward, f"{x}_proj")) for x in ("gate", "up", "down")}


def is_plain(hf: PreTrainedModel, or_blocks: bool = False) -> bool:
    """Whether native code can run a model: of a known family and one dtype, without others' hooks,
    sliding windows, layers without RoPE (SmolLM3's) and additional weights (LoRA's). Its matrices
    are not quantized; with `or_blocks` they may be a GGUF file's blocks."""
    packed = packed_linears(hf).values()
    known = all(or_blocks and isinstance(linear, PackedMatrix) for linear in packed)
    if hf.config.model_type not in PLAIN or windows(hf.config)[0] or not known:
        return False
    has_rope = all(getattr(layer.self_attn, "use_rope", True) for layer in hf.model.layers)
    if not has_rope or any(map(_is_changed, hf.modules())):
        return False
    weights = [hf.model.norm.weight, matrix_of(hf.model.embed_tokens), matrix_of(hf.lm_head)]
    for layer in map(layer_weights, hf.model.layers):
        weights += [weight for weight in vars(layer).values() if weight is not None]
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    is_uniform = all(weight.dtype == hf.model.norm.weight.dtype for weight in weights)
    is_uniform &= all(tensor.is_contiguous() for tensor in tensors)
    return is_uniform and set(map(id, tensors)) == set(map(id, hf.parameters()))


def _is_changed(module: nn.Module) -> bool:
    """Whether hooks or another `forward` may change what a module computes. Those that transformers
    leaves behind when it is asked for hidden states or attentions only record."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    others = [hook for hook in hooks if hook.__module__ != "transformers.utils.output_capturing"]
    return bool(others) or "forward" in vars(module)


def fingerprint(model: nn.Module) -> str | None:
    """A hash of the first numbers of each weight in bfloat16. It is the same in any number format,
    except for float32 weights read in float16, which are rounded twice. None for a `meta_model`."""
    digest = hashlib.sha256()
    weights = dict[int, Tensor]()  # a tied weight is in it once
    for module in model.modules():
        if isinstance(module, PackedMatrix):
            n_rows = min(module.shape[0], -(-FINGERPRINTED // module.shape[1]))
            weights.setdefault(module.blocks_OB.data_ptr(), module.widened(torch.arange(n_rows)))
        # weights of other types are quantized
        plain = (x for x in module.parameters(recurse=False) if type(x) is nn.Parameter)
        weights |= {id(weight): weight for weight in plain}
    for weight in weights.values():
        if weight.is_meta:
            return None
        numbers = weight.detach().flatten()[:FINGERPRINTED].bfloat16().cpu()
        numbers = numbers.masked_fill(numbers.abs() < 2**-16, 0)  # float16 does not have them all
        digest.update(numbers.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
