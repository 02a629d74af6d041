"""The Triton kernels, without a GPU: in Triton's interpreter, and compiled for cards that are not
here. On a GPU the same checks run there."""

import itertools
import os
import re
import runpy
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import ROOT

from kangaroo import cuda
from kangaroo.cuda import launching
from kangaroo.cuda.launching import Card
from kangaroo.engine.backend import LayerWeights, Sizes
from kangaroo.engine.cache import ForwardMeta, KVCache

pytest.importorskip("triton", reason="needs the package triton")

slow = pytest.mark.slow
CHECKS = Path(__file__).parent / "interpreted"
PRODUCTS = {f"{name}_kernel" for name in ("qkv", "linear", "gate_up", "choose")}
BETWEEN = "attend", "norm", "path", "combine", "choice", "rotate"
OTHERS = {f"{name}_kernel" for name in BETWEEN}
INSTRUCTION = r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S*"
WIDTHS = 1, 17, 64, 128, 520  # the last two are prompts


@pytest.mark.parametrize(
    "mark, interpreted",
    [
        pytest.param("not slow", True, id="quick"),
        pytest.param("slow", True, id="all", marks=pytest.mark.slow),
        pytest.param("slow or not slow", False, id="gpu", marks=pytest.mark.gpu),
    ],
)
def test_kernels_compute_what_they_should(mark, interpreted):
    """In a process of its own: Triton reads the variable when it is imported."""
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    files = sorted(map(str, CHECKS.glob("check_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:xdist", "-m", mark]
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "size, is_plain, named",
    [
        *((15, True, "size 15"), (16, False, "hooks")),
        *((16, True, x) for x in ("Triton cannot run here", "triton is not installed")),  # a CPU
    ],
    ids=str,
)
def test_a_warning_names_why_kernels_cannot_run(caplog, monkeypatch, size, is_plain, named):
    if "installed" in named:
        monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    sizes = Sizes(64, 4, 2, size, 128, 1e-5, 0.25)
    assert not cuda.runs_layers(torch.float16, sizes, is_plain, torch.device("cpu"), None)
    (record,) = caplog.records
    assert "goes on in transformers' modules" in record.message and named in record.message


CARDS = {
    80: Card(108, 163 << 10, rows=16, overlaps=False),
    86: Card(84, 99 << 10, rows=16, overlaps=False),
    89: Card(128, 99 << 10, rows=16, overlaps=False),
    90: Card(132, 227 << 10, rows=64),
    100: Card(148, 227 << 10, rows=128),
    120: Card(170, 99 << 10, rows=16),
}
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
TYPES |= {torch.int32: "i32", torch.int64: "i64"}
# hidden size, heads, key heads, their size, width of the feed-forward part, vocabulary
SHAPES = {
    "7b": (4096, 32, 32, 128, 11008, 32000),
    "8b": (4096, 32, 8, 128, 14336, 128256),
    "smollm2": (576, 9, 3, 64, 1536, 49152),
    "256": (2048, 8, 1, 256, 16384, 32000),
    "70b": (8192, 64, 8, 128, 28672, 128256),
}


def launches(
    monkeypatch, capability: int, shape: str, dtype: torch.dtype, tokens: int, slots: int = 8192
):
    """What a layer and a head would launch on a card: kernels with their arguments.
    Tensors have no memory."""
    from kangaroo.cuda import layers

    launched = []
    monkeypatch.setattr(launching, "card_of", lambda device: CARDS[capability])
    monkeypatch.setattr(launching, "start", lambda *launch: launched.append(launch))
    hidden, heads, kv_heads, size, wide, vocabulary = SHAPES[shape]
    empty = partial(torch.empty, dtype=dtype, device="meta")
    of_q, of_k = heads * size, kv_heads * size
    layer = LayerWeights(
        empty(hidden),
        *(empty(outputs, hidden) for outputs in (of_q, of_k, of_k)),
        empty(hidden, of_q),
        *(empty(outputs) for outputs in (of_q, of_k, of_k)),
        feed_forward_norm=empty(hidden),
        gate=empty(wide, hidden),
        up=empty(wide, hidden),
        down=empty(hidden, wide),
    )
    if shape == "256":
        layer.q_norm = layer.k_norm = empty(size)
    sizes = Sizes(hidden, heads, kv_heads, size, wide, 1e-5, size**-0.5)
    cache = KVCache.empty(1, slots, kv_heads, size, dtype, [torch.device("meta")])
    places = empty(1, tokens, dtype=torch.int64)
    rope = empty(1, tokens, size), empty(1, tokens, size)
    meta = ForwardMeta(places, places, empty(1, 1, tokens, slots), slots, slice(0, 1), rope, True)
    with torch.no_grad():
        stack = layers.Stack([layer], sizes)
        if tokens > 64:  # a prompt
            meta = replace(meta, bias_R1TE=None)
        stack(empty(1, tokens, hidden), cache, meta, range(1))
        text = replace(meta, bias_R1TE=None, extent=tokens)
        stack.run_text(empty(1, tokens, hidden), text, range(1))
        head = layers.Head(empty(vocabulary, hidden), sizes)
        head(empty(tokens, hidden))
        head.choose(empty(1, tokens, hidden))
    return launched


def compiled(capability: int, kernel, args, options):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    left, types, constants, known = iter(args), {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            types[name], constants[name] = "constexpr", options[name]
            continue
        value = next(left)
        if value is None:
            types[name], constants[name] = "constexpr", None
            continue
        is_tensor = isinstance(value, torch.Tensor)
        of_number = "i32" if isinstance(value, int) else "fp32"
        types[name] = f"*{TYPES[value.dtype]}" if is_tensor else of_number
        whole = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if is_tensor or whole:
            known[(place,)] = [["tt.divisibility", 16]]
    names = {"num_warps", "num_stages", "enable_fp_fusion", "launch_pdl"}
    source, target = ASTSource(kernel, types, constants, known), GPUTarget("cuda", capability, 32)
    how = {name: options[name] for name in names & options.keys()}
    return triton.compile(source, target=target, options=how)


def all_cases():
    """A card, a shape, a format, and whether products are compiled for all numbers of tokens."""
    quick = [(80, "smollm2", torch.bfloat16), (89, "8b", torch.float16), (90, "7b", torch.bfloat16)]
    formats = [("7b", torch.bfloat16), ("8b", torch.float16), ("256", torch.bfloat16)]
    formats += [("smollm2", torch.bfloat16), ("smollm2", torch.float32)]
    cases = [(card, *case) for card, case in itertools.product(CARDS, formats)]
    fast = [pytest.param(*case, False, id=f"{case[0]}-quick") for case in quick]
    return fast + [pytest.param(*case, True, marks=pytest.mark.slow) for case in cases]


def kind_of(made) -> frozenset[str]:
    """The instructions that multiply, with the rows of those that do not name them."""
    rows = re.findall(r"blockM = \d+", made.asm["ttgir"])
    return frozenset(re.findall(INSTRUCTION, made.asm["ptx"])) | frozenset(rows)


@pytest.mark.parametrize("capability, shape, dtype, all_widths", all_cases())
def test_kernels_become_one_kind_of_instruction(monkeypatch, capability, shape, dtype, all_widths):
    """Of one kernel and matrix, whatever the number of tokens; no more shared memory than the card
    has."""
    card = CARDS[capability]
    kinds: dict[tuple, set[frozenset[str]]] = {}
    compiled_calls = set()
    for tokens in WIDTHS if all_widths else (1, 520):
        for kernel, _, args, options in launches(monkeypatch, capability, shape, dtype, tokens):
            name = kernel.fn.__name__
            matrix = (name, options.get("K"), options.get("PARTS"))
            call = (*matrix, *(options.get(x) for x in ("TOKENS", "FOLDS", "ROWS", "PATHS")))
            is_wanted = all_widths or tokens == 1 or name in ("linear_kernel", "attend_kernel")
            if call in compiled_calls or not is_wanted:
                continue
            compiled_calls.add(call)
            made = compiled(capability, kernel, args, options)
            assert made.metadata.shared <= card.shared, call
            assert ("griddepcontrol.wait" in made.asm["ptx"]) == card.overlaps
            kinds.setdefault(matrix, set()).add(kind_of(made))
    for matrix, instructions in kinds.items():
        multiplies = matrix[0] in PRODUCTS | {"attend_kernel"} and dtype != torch.float32
        assert len(instructions) == 1 and any(instructions) == multiplies, (matrix, instructions)
    assert {matrix[0] for matrix in kinds} == PRODUCTS | OTHERS


def spilled(made) -> int:
    """Bytes that a thread keeps in memory since it has no registers for them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout)[1])


@pytest.mark.parametrize(
    "capability, tokens",
    [(90, 1), pytest.param(90, 520, marks=slow)]
    + [pytest.param(x, y, marks=slow) for x in CARDS if x != 90 for y in (1, 520)],
)
def test_weights_come_before_the_wait_and_products_overlap_loads(monkeypatch, capability, tokens):
    """The lines of the first steps are asked for while the kernel before still runs; nothing that
    it writes is read yet. While a step is multiplied, the loads of two more are under way. And
    nothing is spilled."""
    card = CARDS[capability]
    if tokens == 1:  # and where it may turn out that nobody needs them
        needed = torch.empty((), dtype=torch.int32, device="meta")
        monkeypatch.setattr(launching, "_needed", needed)
    names = set()
    for kernel, _, args, options in launches(monkeypatch, capability, "7b", torch.bfloat16, tokens):
        name = kernel.fn.__name__
        if name not in PRODUCTS or name in names:
            continue
        names.add(name)
        made = compiled(capability, kernel, args, options)
        ptx = made.asm["ptx"]
        before, wait, _ = ptx.partition("griddepcontrol.wait")
        assert bool(wait) == card.overlaps
        assert before.count("prefetch.global.L2") == 4 * card.overlaps and "cp.async" in ptx
        assert not wait or not re.search(r"ld\.global|cp\.async", before)
        waits = [int(x) for x in re.findall(r"async_wait.*num = (\d+)", made.asm["ttgir"])]
        assert max(waits) == 2 * (options["STAGES"] - 2) > 0, name
        if "wgmma" in ptx:  # the product of a step ends after that of the next one has begun
            assert re.search(r"pendings = 1\b", made.asm["ttgir"]), name
        assert spilled(made) == 0, name
    assert names == PRODUCTS


def test_grids_and_memory_of_a_long_text_are_bounded(monkeypatch):
    """64 nodes of a tree at 131,072 slots, and a prompt's pass."""
    for tokens in (64, 1024):
        launched = launches(monkeypatch, 90, "70b", torch.bfloat16, tokens, slots=1 << 17)
        for kernel, grid, args, _ in launched:
            assert all(programs < 1 << 16 for programs in grid[1:]), kernel.fn.__name__
            sums = [x.nbytes for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
            weights = 2 * 128256 * 8192
            assert max(x for x in sums if x != weights) <= 1 << 29, kernel.fn.__name__


@pytest.mark.parametrize("is_amd", [False, True])
def test_a_card_is_what_the_driver_says(is_amd, monkeypatch):
    """An AMD card's major version may be above Hopper's."""
    gpu = SimpleNamespace(major=9, minor=4, multi_processor_count=304)
    gpu.shared_memory_per_block = 64 << 10
    if not is_amd:
        gpu.shared_memory_per_block_optin = 227 << 10
    monkeypatch.setattr(torch.version, "hip", "6.4" if is_amd else None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    card = launching.card_of.__wrapped__(torch.device("cuda"))
    wanted = Card(304, 64 << 10, 16, False) if is_amd else Card(304, 227 << 10, 64, True)
    assert card == wanted


def test_the_arithmetic_on_the_page_is_what_the_script_prints(capsys):
    runpy.run_path(str(ROOT / "scripts/gpu/arithmetic.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    shown = re.findall(r"^\| [78]B, .*", (ROOT / "docs/gpu.md").read_text(), flags=re.M)
    assert shown and set(shown) <= set(printed)
