"""Quantizes the weights of a target's layers; not activations, embeddings, norms and the LM head,
of which drafters read rows."""

from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from kangaroo.models.layer_weights import FORMATS, has_experts, packed_linears
from kangaroo.models.packed import PackedLinear
from kangaroo.utils.errors import ConfigError, MissingPackage, UnsupportedModel
from kangaroo.utils.folders import install

GROUP = 32  # numbers that share a scale
NF4_GROUP = 64  # the same of nf4


class Quantization(Enum):
    """Format of a layer's weights: `int8` with a scale per output; `int4` with one per `GROUP`
    numbers, of which each takes a byte on a CPU; or bitsandbytes' `nf4`, whose 16 values follow a
    normal distribution (QLoRA, arXiv 2305.14314)."""

    int8 = "int8"
    int4 = "int4"
    nf4 = "nf4"

    @property
    def package(self) -> str:
        return "bitsandbytes" if self is Quantization.nf4 else "torchao"


def check_package(quantization: Quantization) -> None:
    """Raise `MissingPackage` if the package for this format is not installed."""
    if find_spec(quantization.package) is None:
        raise MissingPackage(
            f"quantization={quantization.value} needs the package {quantization.package}: "
            f"{install('quantized')}. Or pass a checkpoint that is quantized already."
        )


def quantize(
    model: PreTrainedModel, quantization: Quantization, device: torch.device | str | None
) -> None:
    """Quantize a model's layers in place, one by one, and move the model to `device`, if any.
    Errors: `ConfigError` if it is quantized already; `UnsupportedModel` if it has experts."""
    if packed_linears(model):
        method = quantization_fields(model.config).get("quant_method", "format not named")
        raise ConfigError(
            f"'{model.config.name_or_path}' is quantized already ({method}); leave "
            f"quantization={quantization.value} out."
        )
    if has_experts(model):
        raise UnsupportedModel(
            f"quantization={quantization.value} is for linear layers, and most weights of a "
            f"{model.config.model_type} model are experts'. Pass a checkpoint that is quantized "
            "already (FP8, AWQ)."
        )
    for layer in model.model.layers:
        layer = layer if device is None else layer.to(device)
        if quantization is Quantization.nf4:
            _to_nf4(layer)
        else:
            _to_integers(layer, quantization)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]


def _to_integers(layer: nn.Module, quantization: Quantization) -> None:
    from torchao import quantization as ao  # of the extra `quantized`

    weight = next(layer.parameters())
    if quantization is Quantization.int8:
        config = ao.Int8WeightOnlyConfig()
    elif weight.is_cuda and weight.dtype is torch.bfloat16:  # torch has a kernel for this
        config = ao.Int4WeightOnlyConfig(GROUP, int4_packing_format="tile_packed_to_4d")
    else:
        group = ao.PerGroup(GROUP)
        config = ao.IntxWeightOnlyConfig(torch.int4, group)  # type: ignore[attr-defined]
    ao.quantize_(layer, config)


def _to_nf4(layer: nn.Module) -> None:
    from bitsandbytes import nn as bnb  # of the extra `quantized`

    linears = [(name, part) for name, part in layer.named_modules() if isinstance(part, nn.Linear)]
    for name, linear in linears:
        weight = linear.weight
        packed = bnb.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=weight.dtype,
            device="meta",
        )
        packed.weight = bnb.Params4bit(weight.data, requires_grad=False, quant_type="nf4")
        packed.bias = linear.bias
        if linear.in_features % NF4_GROUP:  # its CPU kernels need whole groups
            packed.support_avx512bf16_for_cpu = False
        layer.set_submodule(name, packed.to(weight.device))


def check_quantized(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` for a checkpoint whose LM head is quantized, or where a token's
    results depend on the other tokens of a pass."""
    name = model.config.name_or_path or model.config.model_type
    weight = getattr(model.lm_head, "weight", None)
    is_plain = type(weight) is nn.Parameter and weight.dtype in FORMATS
    # the rows of a packed head are widened as they are read
    if not is_plain and not isinstance(model.lm_head, PackedLinear):
        raise UnsupportedModel(
            f"the LM head of '{name}' is quantized, and drafters read rows of it. Pass model.path= "
            "a checkpoint that leaves lm_head as it is, as most do."
        )
    for linear in packed_linears(model).values():
        if getattr(getattr(linear, "state", None), "threshold", 0):
            raise UnsupportedModel(
                f"'{name}' is quantized by LLM.int8(), whose outliers depend on all tokens of a "
                "pass: drafting would change what the model writes. Quantize it with "
                "llm_int8_threshold=0, or pass the checkpoint that it was made from, with "
                "model.quantization=int8."
            )


def quantization_fields(config: PretrainedConfig) -> dict[str, Any]:
    """The quantization settings in a checkpoint's config; empty if it is not quantized."""
    fields = getattr(config, "quantization_config", None) or {}
    return fields if isinstance(fields, dict) else fields.to_dict()


def weight_bits(config: PretrainedConfig, quantization: Quantization | None) -> int | None:
    """Bits of each number of the layers' weights in memory; None if they are not quantized."""
    if quantization is not None:
        return 8 if quantization is Quantization.int8 else 4
    fields = quantization_fields(config)
    is_dequantized = fields.get("quant_method") == "fp8" and not torch.cuda.is_available()
    if not fields or is_dequantized:
        return None
    return fields.get("bits") or (4 if fields.get("load_in_4bit") else 8)
