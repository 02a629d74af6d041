"""Targets whose layers have quantized weights; what is multiplied with them is not quantized, nor
are embeddings, norms and the LM head, of which drafters read rows."""

from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from kangaroo.models.layer_weights import FORMATS, has_experts, packed_linears
from kangaroo.utils.errors import ConfigError, MissingPackage, UnsupportedModel
from kangaroo.utils.folders import install

GROUP = 32  # numbers of an int4 weight that share a scale


class Quantization(Enum):
    """How a layer's weights lie in memory: `int8` with a scale for each output, `int4` with one for
    each `GROUP` numbers (on a CPU torchao keeps these in a byte each)."""

    int8 = "int8"
    int4 = "int4"


def check_torchao(quantization: Quantization) -> None:
    """Raise `MissingPackage` where torchao is not installed."""
    if find_spec("torchao") is None:
        raise MissingPackage(
            f"model.quantization={quantization.value} needs the package torchao: "
            f"{install('quantized')}. Or pass model.path= a checkpoint that is quantized already."
        )


def quantize(
    model: PreTrainedModel, quantization: Quantization, device: torch.device | str | None
) -> None:
    """Quantize the weights of a model's layers in place, one layer after another, on `device`,
    where all else then goes too; None leaves each where it lies. Errors: `ConfigError` for a model
    that is quantized already; `UnsupportedModel` for experts, which torchao leaves alone."""
    from torchao import quantization as ao  # of the extra `quantized`

    if packed_linears(model):
        method = method_of(model.config).get("quant_method", "format not named")
        raise ConfigError(
            f"'{model.config.name_or_path}' is quantized already ({method}); leave "
            f"model.quantization={quantization.value} out."
        )
    if has_experts(model):
        raise UnsupportedModel(
            f"model.quantization={quantization.value} is for linear layers, and most weights of a "
            f"{model.config.model_type} model are experts'. Pass model.path= a checkpoint that is "
            "quantized already (FP8, AWQ)."
        )
    for layer in model.model.layers:
        layer = layer if device is None else layer.to(device)
        weight = next(layer.parameters())
        if quantization is Quantization.int8:
            how = ao.Int8WeightOnlyConfig()
        elif weight.is_cuda and weight.dtype is torch.bfloat16:  # torch has a kernel for that
            how = ao.Int4WeightOnlyConfig(GROUP, int4_packing_format="tile_packed_to_4d")
        else:
            how = ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(GROUP))  # type: ignore[attr-defined]
        ao.quantize_(layer, how)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]


def check_head(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` for a checkpoint whose LM head is quantized."""
    head: Any = model.lm_head
    weight = getattr(head, "weight", None)
    name = model.config.name_or_path or model.config.model_type
    if weight is None or weight.dtype not in FORMATS or type(weight) is not torch.nn.Parameter:
        raise UnsupportedModel(
            f"the LM head of '{name}' is quantized, and drafters read rows of it. Pass model.path= "
            "a checkpoint that leaves lm_head as it is, as most do."
        )


def method_of(config: PretrainedConfig) -> dict[str, Any]:
    """How a checkpoint is quantized, as its config says; nothing where it is not."""
    fields = getattr(config, "quantization_config", None) or {}
    return fields if isinstance(fields, dict) else fields.to_dict()


def bits_of(config: PretrainedConfig, quantization: Quantization | None) -> int | None:
    """How many bits a number of the layers' weights takes; None where they are not quantized."""
    if quantization is not None:
        return int(quantization.value.removeprefix("int"))
    if not (fields := method_of(config)):
        return None
    return fields.get("bits") or (4 if fields.get("load_in_4bit") else 8)
