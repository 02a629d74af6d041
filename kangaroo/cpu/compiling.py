"""Builds `cpp/decode.cpp` for this very processor, by whatever C++ compiler there is."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from kangaroo.utils.folders import cache_folder

SOURCES = sorted((Path(__file__).parent / "cpp").iterdir())
MAIN = next(source for source in SOURCES if source.suffix == ".cpp")
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"]
SHARED = ["-shared", "-fPIC"]
OPENMP, STANDARD = ["-fopenmp", "-include", "omp.h"], ["-pthread"]  # threads: see `threads.h`


def compiler() -> str:
    """Errors: `OSError` where there is none."""
    name = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not name:
        raise OSError("there is no C++ compiler; install g++, or name one in CXX")
    return name


def supported(compiler: str, *choices: list[str]) -> tuple[list[str], str]:
    """The first set of flags that the compiler takes, and what it defines then. Errors:
    `CalledProcessError` where it takes none."""
    for flags in choices:
        command = [compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return flags, done.stdout
    raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)


def build(compiler: str, target: list[str]) -> Path:
    """Compile `decode.cpp`, once for each compiler, processor and version of the sources."""
    machine, predefined = supported(compiler, target + OPENMP, target + STANDARD)
    flags = " ".join(FLAGS + machine)
    text = "".join(source.read_text("utf-8") for source in SOURCES)
    key = hashlib.sha256((text + flags + predefined).encode()).hexdigest()[:16]
    file = cache_folder() / "native" / f"decode-{key}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")  # renamed when whole: others may build too
        command = [compiler, *FLAGS, *machine, *SHARED, str(MAIN), "-o", str(partial)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(partial, file)
    return file
