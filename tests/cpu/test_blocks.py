"""Products of GGUF's blocks in native code, also for processors that are not here, and under
sanitizers.

Shapes: M tokens, D numbers of a token, O outputs.
"""

import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kangaroo.cpu import native
from kangaroo.cpu.backend import CpuBackend
from kangaroo.cpu.blocks import Blocks
from kangaroo.cpu.compiling import FLAGS, SOURCES
from kangaroo.engine.backend import Sizes
from kangaroo.models.packed import PackedLinear

KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]
KINDS += [Kind.Q2_K, Kind.Q3_K, Kind.IQ4_NL, Kind.IQ4_XS]
WIDTH, OUTPUTS = 512, 37  # no multiple of the sixteen rows that lie side by side
SIZES = Sizes(WIDTH, heads=8, kv_heads=2, head_size=64, feed_forward=64, eps=1e-5, scaling=0.125)
# Where the scales of blocks are that have no writer in Python.
HALVES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
HALVES |= {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,)}


def blocks_of(kind: Kind) -> np.ndarray:
    """Random rows of a kind; of kinds without a writer only the scales are chosen."""
    rng = np.random.default_rng(0)
    if kind not in HALVES:
        return gguf.quantize(rng.standard_normal((OUTPUTS, WIDTH), np.float32), kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks_XB = rng.integers(0, 256, (OUTPUTS * WIDTH // numbers, size), dtype=np.uint8)
    for place in HALVES[kind]:
        scales_X = rng.uniform(1e-4, 1e-2, len(blocks_XB)).astype(np.float16)
        blocks_XB[:, place : place + 2] = scales_X.view(np.uint8).reshape(-1, 2)
    return blocks_XB.reshape(OUTPUTS, -1)


def head_of(blocks_OB: np.ndarray, kind: Kind, dtype: torch.dtype) -> native.Head:
    library = native.library()
    if library is None:
        pytest.skip("needs a C++ compiler")
    linear = PackedLinear(torch.from_numpy(blocks_OB), kind, dtype)
    head = CpuBackend(library, SIZES).head(linear)
    assert isinstance(head.weight_OD, Blocks)
    return head


def states(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_numbers_with_a_token_in_eight_bits(kind):
    blocks_OB = blocks_of(kind)
    x_MD = states(5)
    parts = x_MD.double().unflatten(1, (-1, 32))
    step = parts.abs().amax(-1, keepdim=True) / 127
    rounded_MD = ((parts / step).round() * step).flatten(1)
    weight_OD = torch.from_numpy(gguf.dequantize(blocks_OB, kind)).double()
    expected_MO = rounded_MD @ weight_OD.T
    logits_MO = head_of(blocks_OB, kind, torch.float32)(x_MD)
    bound = 2e-5 * (rounded_MD.abs() @ weight_OD.abs().T).max()
    # minima take the token's own sum, of which eight bits know nothing: the same within a step
    assert (logits_MO - expected_MO).abs().max() < bound


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_whatever_is_beside_it(kind, dtype):
    head = head_of(blocks_of(kind), kind, dtype)
    x_MD = states(70, dtype)
    whole_MO = head(x_MD)
    for start, stop in ((0, 1), (3, 5), (7, 15), (20, 53)):
        assert torch.equal(head(x_MD[start:stop]), whole_MO[start:stop])


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_blocks_give_numbers_or_none_and_nothing_beyond_them(kind):
    """Any bytes are blocks; scales may be infinite. A row's damage stays in its own output."""
    whole_OB, rng = blocks_of(kind), np.random.default_rng(3)
    damaged_OB = whole_OB.copy()
    damaged_OB[20] = rng.integers(0, 256, whole_OB.shape[1], dtype=np.uint8)
    damaged_OB[21] = 255
    x_MD = states(3)
    expected_MO = head_of(whole_OB, kind, torch.float32)(x_MD)
    logits_MO = head_of(damaged_OB, kind, torch.float32)(x_MD)
    others = [row for row in range(OUTPUTS) if row not in (20, 21)]
    assert torch.equal(logits_MO[:, others], expected_MO[:, others])


@pytest.mark.parametrize("dtype", native.DTYPES)
def test_the_likeliest_token_by_five_bits_is_that_of_all_eight(dtype):
    """For states along what five bits leave out of a row, too: it may be the likeliest by this
    alone. Of equal rows the first wins; scales of some are large, or infinite."""
    library = native.library()
    if library is None:
        pytest.skip("needs a C++ compiler")
    rng = np.random.default_rng(5)
    blocks_OB = gguf.quantize(rng.standard_normal((1003, WIDTH), np.float32), Kind.Q8_0)
    blocks_OB[503:] = blocks_OB[:500]
    weight_OD = torch.from_numpy(gguf.dequantize(blocks_OB, Kind.Q8_0))
    step_OP1 = weight_OD.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    lost_OD = (weight_OD.unflatten(1, (-1, 32)) / step_OP1).round().remainder(8).sub(3.5)
    x_MD = torch.cat([states(70), (lost_OD * step_OP1).flatten(1)]).to(dtype)
    heads = [blocks_OB, blocks_OB.copy(), blocks_OB.copy()]
    heads[1][::7, 1] ^= 0x10  # another exponent
    heads[2][300, :2] = np.array([np.inf], np.float16).view(np.uint8)
    norm_D = torch.ones(WIDTH, dtype=dtype)
    for blocks in heads:
        linear = PackedLinear(torch.from_numpy(blocks), Kind.Q8_0, dtype)
        head = CpuBackend(library, SIZES).head(linear, rounds=True)
        assert head.rough.weight
        logits_MO = head(x_MD, norm_D)
        parts = x_MD[:1], x_MD[1:6], *x_MD[6:].split(100)
        likeliest_M = torch.cat([head.likeliest(x, norm_D) for x in parts])
        if blocks is heads[2]:  # beside an infinite row, within its sixteen, any may be chosen
            logits_MO[:, 288:304] = -torch.inf
            best_M = logits_MO.amax(-1)
            logits_MO[:, 288:304] = torch.inf
            assert (logits_MO.gather(1, likeliest_M[:, None])[:, 0] >= best_M).all()
        else:
            assert torch.equal(likeliest_M, logits_MO.argmax(-1))


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
