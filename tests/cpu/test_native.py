"""Native layers compute what transformers' layers compute, and a token's result is its own.

Shapes: B rows, N tokens a row.
"""

import ctypes
import logging
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import ROOT
from helpers import (
    VOCABULARY,
    adapter_for,
    chain_of,
    random_prompts,
    tiny,
    tiny_model,
    vanilla_texts,
)

from kangaroo.cpu import compiling, native, structs
from kangaroo.drafters.base import FromText
from kangaroo.drafters.cascade import Cascade
from kangaroo.engine.cache import KVCache
from kangaroo.engine.engine import Engine
from kangaroo.engine.prefill import read
from kangaroo.engine.tree import Tree
from kangaroo.models.target import TargetModel

SLOTS = 160
FAMILIES = {
    "llama": {},
    "llama-ungrouped": {"num_key_value_heads": 4},
    "llama-biased": {"attention_bias": True},
    "llama-wide": {"head_dim": 96},  # six registers of values
    "qwen2": {},
    "qwen3": {"head_dim": 40},  # no multiple of a vector
    "mistral": {"hidden_size": 72, "intermediate_size": 200},
}


def filled_cache(lm: TargetModel, rows: int) -> KVCache:
    cache, generator = lm.new_cache(rows, SLOTS), torch.Generator().manual_seed(1)
    for cached in (*cache.keys, *cache.values):
        cached.copy_(torch.randn(cached.shape, generator=generator))
    return cache


def pairs(first: KVCache, second: KVCache):
    return zip((*first.keys, *first.values), (*second.keys, *second.values), strict=True)


@torch.no_grad()
def logits(lm: TargetModel, starts: list[int], tokens_BN: torch.Tensor, cache=None):
    cache = cache or filled_cache(lm, len(starts))
    tree = Tree.chain(tokens_BN.shape[1], lm.device)
    meta = lm.forward_meta(tree, torch.tensor(starts), max(starts) + tree.size, SLOTS)
    x_BND, _ = lm.run(lm.embed(tokens_BN), cache, meta, range(lm.n_layers))
    return lm.logits(x_BND).float(), cache


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(2))


# The float32 sums differ in their order alone. In bfloat16 both round at the same places, to 1/256
# of numbers of up to 20.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.4}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_native_layers_compute_what_the_modules_compute(name, dtype):
    hf = tiny_model(name.split("-")[0], dtype=dtype, **FAMILIES[name])
    starts, tokens_BN = [3, 70, 140], random_tokens(3, 7)
    eager, eager_cache = logits(TargetModel(hf), starts, tokens_BN)
    lm = TargetModel(hf).compile_for_decoding()
    assert lm.fast_layers is not None and lm.fast_head is not None
    compiled, compiled_cache = logits(lm, starts, tokens_BN)
    torch.testing.assert_close(compiled, eager, atol=TOLERANCE[dtype], rtol=0)
    for ours, theirs in pairs(compiled_cache, eager_cache):
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("head_dim", [8, 96])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_tokens_result_depends_on_nothing_beside_it(dtype, head_dim):
    """Bit by bit: tokens of one pass, rows of the batch, and slots that attention covers."""
    lm = tiny(dtype=dtype, head_dim=head_dim).compile_for_decoding()
    starts, tokens_BN = [3, 70, 140], random_tokens(3, 11)
    together, cache = logits(lm, starts, tokens_BN)
    one_by_one = filled_cache(lm, 3)
    for row, start in enumerate(starts):
        alone = lm.new_cache(1, SLOTS)
        here = slice(row * SLOTS, (row + 1) * SLOTS)
        for mine, all_rows in pairs(alone, one_by_one):
            mine.copy_(all_rows[here])
        for i in range(tokens_BN.shape[1]):
            token = tokens_BN[row : row + 1, i : i + 1]
            assert torch.equal(logits(lm, [start + i], token, alone)[0][0, 0], together[row, i])
        assert all(torch.equal(mine, all_rows[here]) for mine, all_rows in pairs(alone, cache))


def test_any_number_of_threads_computes_the_same_wherever_it_is_called():
    """Bit by bit; more threads than processors, and in two Python threads at the same time."""
    lm, before = tiny(dtype=torch.bfloat16).compile_for_decoding(), torch.get_num_threads()
    starts, tokens_BN = [3, 70, 140], random_tokens(3, 11)
    alone, _ = logits(lm, starts, tokens_BN)
    try:
        torch.set_num_threads(5)
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(logits, lm, starts, tokens_BN) for _ in range(8)]
            assert all(torch.equal(call.result()[0], alone) for call in calls)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("overrides", [{"hidden_act": "gelu"}, {"dtype": torch.float16}])
def test_other_models_stay_eager(overrides):
    lm = tiny(**overrides).compile_for_decoding()
    assert lm.fast_layers is None and lm.fast_head is None


@pytest.mark.parametrize("biased", [False, True])
def test_a_prompt_that_is_read_here_may_come_in_any_parts(biased):
    """Its states are the same bit by bit, beside other tokens or not, and close to the modules'."""
    sizes = dict(hidden_size=64, intermediate_size=96, head_dim=32, dtype=torch.bfloat16)
    sizes |= dict(attention_bias=biased)
    tokens_1T, states, lm = random_tokens(1, 200), {}, tiny(**sizes).compile_for_decoding()
    on_x86 = platform.machine() in ("x86_64", "AMD64")  # PyTorch is slower on all of these
    if lm.fast_layers is None or not (on_x86 or lm.fast_layers.longest_prompt):
        pytest.skip("PyTorch reads prompts on this processor")
    wide = native.library().turns_rows() or native.library().uses_tiles()
    chunk = native.WIDE_CHUNK if wide else native.PROMPT_CHUNK
    assert lm.prompt_chunk(200) == chunk
    assert (lm.prompt_chunk(4000) > chunk) == bool(native.library().uses_tiles())
    for parts in (200, 64, 33, 7, "eager"):
        lm, step = (tiny(**sizes), 200) if parts == "eager" else (lm, parts)
        cache, states[parts] = lm.new_cache(1, 256), torch.empty(1, 200, 64, dtype=torch.bfloat16)
        for first in range(0, 200, step):
            meta = lm.chunk(first, min(first + step, 200), 0, cache.n_slots)
            with torch.no_grad():
                x_1TD = lm.embed(tokens_1T[:, first : first + step])
                states[parts][:, first : first + step] = lm.run(x_1TD, cache, meta, range(4))[0]
    for parts in (64, 33, 7):
        assert torch.equal(states[parts], states[200]), parts
    near = {"atol": TOLERANCE[torch.bfloat16], "rtol": 0.02}
    torch.testing.assert_close(states[200], states["eager"], **near)


@pytest.mark.parametrize("start", [0, 20])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_prompt_takes_no_more_of_the_last_layer_than_is_read(name, dtype, start):
    """The last token's state and all keys and values are those of the whole pass, bit by bit."""
    lm = tiny(name.split("-")[0], dtype=dtype, **FAMILIES[name]).compile_for_decoding()
    tokens_1T = random_tokens(1, 30)
    whole, cache, tapped = (filled_cache(lm, 2) for _ in range(3))
    meta = lm.chunk(start, start + 30, 1, SLOTS)
    every_1TD, taps = lm.run(lm.embed(tokens_1T), whole, meta, range(lm.n_layers), (1,))
    last_11D, (_, own_block, own_taps) = read(lm, tokens_1T, start, cache, 1, (1,))
    _, (_, _, all_taps) = read(lm, tokens_1T, start, tapped, 1, (1, lm.n_layers))
    assert torch.equal(last_11D, every_1TD[:, -1:]) and torch.equal(own_taps[1], taps[1])
    assert torch.equal(all_taps[lm.n_layers], every_1TD)
    assert own_block.extent == meta.extent and own_block.rows == meta.rows
    for other in (cache, tapped):
        assert all(torch.equal(*pair) for pair in pairs(whole, other))


@pytest.mark.parametrize("hidden, wide", [(320, 608), (320, 6208), (320, 6200), (72, 608)])
def test_products_of_many_tokens_are_those_of_one(hidden, wide, monkeypatch):
    """Tiles take tokens by sixteen, wide rows are read in parts, many tokens turn rows: no bit
    shows it."""
    monkeypatch.setattr(native, "MOST_TOKENS", 1000)
    sizes = dict(hidden_size=hidden, intermediate_size=wide, head_dim=64, num_key_value_heads=1)
    lm = tiny(**sizes, dtype=torch.bfloat16).compile_for_decoding()
    tokens_B1 = random_tokens(150, 1)

    def run(count: int) -> torch.Tensor:
        return logits(lm, [0] * count, tokens_B1[:count], lm.new_cache(count, SLOTS))[0]

    with ThreadPoolExecutor(1) as pool:  # a thread that has no room from another test
        logits_B1V = pool.submit(run, 150).result()
        for count in (1, 8, 9, 10, 11, 12, 13, 16, 17, 32, 33, 64, 149):
            assert torch.equal(pool.submit(run, count).result(), logits_B1V[:count]), count


def test_prompts_and_training_stay_eager():
    lm = tiny().compile_for_decoding()
    cache, x_BND = lm.new_cache(1, SLOTS), torch.zeros(1, 4, lm.config.hidden_size)
    step = lm.forward_meta(Tree.chain(4, lm.device), torch.tensor([5]), 9, SLOTS)
    takes = lm.fast_layers.takes
    assert not takes(x_BND, cache, step)  # gradients may be wanted
    with torch.no_grad():
        prompt = lm.chunk(0, 4, 0, cache.n_slots)
        assert takes(x_BND, cache, step) and not takes(x_BND, cache, prompt)
        assert not takes(x_BND.expand(native.MOST_TOKENS, -1, -1), cache, step)


def test_structures_are_as_large_as_cpps():
    struct_sizes = native.library().struct_sizes
    struct_sizes.restype = ctypes.POINTER(ctypes.c_int64)
    ours = [*map(ctypes.sizeof, structs.CHECKED), structs.DRAW.itemsize]
    assert ours == struct_sizes()[: len(ours)]


class Foreign(FromText):
    """Drafts from what was written for another model."""

    max_nodes = 3

    def continuation(self, row, text):
        return [] if len(text) % 3 else [VOCABULARY, -1, 2**40]


@pytest.mark.parametrize("second", [False, True])
def test_a_draft_may_hold_ids_that_are_no_tokens(second):
    lm, prompts = tiny().compile_for_decoding(), random_prompts(9, 20)
    chain = chain_of(lm, adapter_for(lm), 4, 0.3)  # which reads states of all nodes
    drafter = Cascade(Foreign(), chain) if second else Foreign()
    texts = [
        p + x.tokens
        for p, x in zip(prompts, Engine(lm, drafter).generate(prompts, 12), strict=True)
    ]
    assert texts == vanilla_texts(lm, prompts, 12)


@pytest.mark.slow
def test_no_drafter_reads_or_writes_outside_of_an_array(tmp_path):
    """The native tests, with a library that AddressSanitizer watches."""
    name = compiling.compiler()
    preloaded = []
    for library in ("libasan.so", "libstdc++.so.6"):  # the latter throws what extensions catch
        command = [name, f"-print-file-name={library}"]
        found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not Path(found).is_absolute():
            pytest.skip(f"{name} has no {library} to load")
        preloaded.append(found)
    (watching := tmp_path / "c++").write_text(
        f'#!/bin/sh\nexec {name} "$@" -O1 -fsanitize=address\n'
    )
    watching.chmod(0o755)
    variables = {"CXX": str(watching), "KANGAROO_CACHE": str(tmp_path)}
    variables |= {"LD_PRELOAD": ":".join(preloaded), "ASAN_OPTIONS": "detect_leaks=0"}
    files = "tests/cpu tests/training/test_distill.py tests/drafters/test_conformance.py".split()
    chosen = ["-k", "native or int8 or outcomes or distill", "-s", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *files, *chosen]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert list((tmp_path / "native").glob("*.so"))


@pytest.fixture
def fresh_library(monkeypatch, tmp_path):
    monkeypatch.setenv("KANGAROO_CACHE", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def test_it_is_built_once(fresh_library, monkeypatch):
    (source := fresh_library / "short.cpp").write_text("int x;\n")
    monkeypatch.setattr(compiling, "MAIN", source)
    assert native.library() is not None
    (file,) = (fresh_library / "native").iterdir()
    built = file.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library() is not None and file.stat().st_mtime_ns == built


@pytest.mark.parametrize(
    "compiler, reason",
    [("", "no C++ compiler"), ("no-such-compiler", "no-such-compiler"), ("false", "false")],
)
def test_without_a_compiler_all_stays_eager(fresh_library, monkeypatch, caplog, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        lm = tiny().compile_for_decoding()
    assert lm.fast_layers is None
    assert "decoding runs in PyTorch" in caplog.text and reason in caplog.text


def test_the_warning_is_the_compilers_first_error(fresh_library, monkeypatch, caplog):
    (fresh_library / "bad.cpp").write_text('#include "bad.h"\nint x;\n')
    (fresh_library / "bad.h").write_text("// nothing here is known\nunknown y;\n")
    monkeypatch.setattr(compiling, "MAIN", fresh_library / "bad.cpp")
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert "bad.h:2" in caplog.text and "unknown" in caplog.text
