"""Builds `cpp/decode.cpp` for this processor with the C++ compiler that is installed."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from kangaroo.utils.folders import cache_folder

SOURCES = sorted((Path(__file__).parent / "cpp").iterdir())
MAIN = next(source for source in SOURCES if source.suffix == ".cpp")
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"]
OPENMP = ["-fopenmp", "-include", "omp.h"]  # threads: see `threads.h`
STANDARD = ["-pthread"]


def compiler() -> str:
    """The C++ compiler. Errors: `OSError` if there is none."""
    name = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not name:
        raise OSError("there is no C++ compiler; install g++, or name one in CXX")
    return name


def supported(compiler: str, *choices: list[str]) -> tuple[list[str], str]:
    """The first choice of flags that the compiler supports, and the macros that it then defines.
    Errors: `CalledProcessError` if it supports none."""
    for flags in choices:
        command = [compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            return flags, result.stdout
    raise subprocess.CalledProcessError(result.returncode, command, result.stdout, result.stderr)


def build(compiler: str, target: list[str]) -> Path:
    """Compile `decode.cpp`, once for each compiler, processor and version of the sources."""
    machine, predefined = supported(compiler, target + OPENMP, target + STANDARD)
    flags = " ".join(FLAGS + machine)
    text = "".join(source.read_text("utf-8") for source in SOURCES)
    key = hashlib.sha256((text + flags + predefined).encode()).hexdigest()[:16]
    file = cache_folder() / "native" / f"decode-{key}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")  # renamed at the end: others may build, too
        command = [compiler, *FLAGS, *machine, "-shared", "-fPIC", str(MAIN), "-o", str(partial)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(partial, file)
    return file
