"""Folders to serve from: a tiny target, adapters as the exporter writes them, weights in int8."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.export import write_for_vllm
from kangaroo.models.loading import random_model
from kangaroo.models.target import TargetModel

VOCABULARY = 128
EXIT = 2


def tiny(**overrides: Any) -> TargetModel:
    """A random Llama that writes 48 tokens without EOS, whose shallow layers are often right.

    Its sizes can be split over two processes, and the attention kernel takes its heads.
    """
    fields = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "hidden_size": 128, "head_dim": 32}
    fields |= {"intermediate_size": 192, "max_position_embeddings": 512, "initializer_range": 0.18}
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    hf = random_model(deep_scale=0.15, **(fields | overrides))
    generator = torch.Generator().manual_seed(1)
    for parameter in hf.parameters():
        if parameter.ndim == 1:  # norms start at one, which would hide mistakes
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return TargetModel(hf)


def adapter_for(lm: TargetModel, **parts: bool) -> Adapter:
    """An adapter that is often right untrained: the layers above the exit change little."""
    adapter = Adapter(lm, EXIT, AdapterHeadConfig(**parts)).start_from(lm)
    adapter.norm.load_state_dict(lm.hf.model.norm.state_dict())
    return adapter.requires_grad_(False)


def save(config: dict[str, Any], state: dict[str, Tensor], folder: Path) -> Path:
    folder.mkdir(parents=True)
    kept = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_model(hf: PreTrainedModel, folder: Path) -> Path:
    """A checkpoint with every weight that the model has, shared ones too."""
    state = hf.state_dict()
    if hf.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return save(hf.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, state, folder)


def save_adapter(
    lm: TargetModel, adapter: Adapter, folder: Path, frequent_K: Tensor | None = None
) -> Path:
    """What `scripts/convert.py export to=vllm` writes."""
    vocabulary = None if frequent_K is None else len(frequent_K)
    about = adapter_files.describe(lm, adapter, {}, vocabulary=vocabulary)
    trained = adapter_files.save(adapter, about, frequent_K, folder.with_suffix(".trained"))
    write_for_vllm(str(trained), lm, folder, threshold=0.6)
    return folder


def save_int8(lm: TargetModel, folder: Path) -> Path:
    """The target with weights and activations of eight bits, as llm-compressor writes it."""
    state = {}
    for name, tensor in lm.hf.state_dict().items():
        if name.endswith("proj.weight"):
            scale_O1 = tensor.abs().amax(1, keepdim=True) / 127
            state[f"{name}_scale"], tensor = scale_O1, (tensor / scale_O1).round().to(torch.int8)
        state[name] = tensor
    bits = {"num_bits": 8, "type": "int"}
    group = {
        "targets": ["Linear"],
        "weights": bits | {"strategy": "channel", "dynamic": False, "symmetric": True},
        # vLLM's other kernel for CPUs takes no float32
        "input_activations": bits | {"strategy": "token", "dynamic": True, "symmetric": False},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    config = lm.hf.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return save(config | {"quantization_config": quantization}, state, folder)
