"""The products of GGUF's blocks on processors that are not here, and under sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kangaroo.cpu.compiling import FLAGS, SOURCES

SOURCE = Path(__file__).with_name("packed_alone.cpp")
SANITIZED = "-O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
OTHERS = ("aarch64-linux-gnu-g++", "-static", "qemu-aarch64")


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler, flags, emulator",
    [
        ("g++", "-march=x86-64", ""),
        ("g++", "-march=haswell", "qemu-x86_64 -cpu Haswell"),  # AVX2
        ("g++", "-march=native", ""),
        ("g++", f"-march=native {SANITIZED}", ""),
        OTHERS,
    ],
    ids=["plain x86-64", "AVX2", "this one", "sanitizers", "aarch64"],
)
def test_products_of_blocks_are_right_elsewhere(compiler, flags, emulator, tmp_path):
    for program in [compiler, *emulator.split()[:1]]:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    command = [compiler, *FLAGS, *flags.split(), f"-I{SOURCES[0].parent}", str(SOURCE)]
    subprocess.run([*command, "-o", str(tmp_path / "program")], check=True)
    done = subprocess.run(
        [*emulator.split(), str(tmp_path / "program")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("target", ["icelake-server", "skylake-avx512"])
def test_products_of_blocks_compile_for_avx_512(target, tmp_path):
    """Which no emulator here runs."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    command = ["g++", *FLAGS, f"-march={target}", f"-I{SOURCES[0].parent}", "-S", str(SOURCE)]
    subprocess.run([*command, "-o", str(tmp_path / "assembly.s")], check=True)
    dot = "vpdpbusd" if target == "icelake-server" else "vpmaddubsw"
    assert f"\t{dot}\t" in (text := (tmp_path / "assembly.s").read_text()) and "zmm" in text
