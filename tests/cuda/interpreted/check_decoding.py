"""Drafters on the kernels write what vanilla decoding on them writes, in half precision too; graphs
record the kernels; prompts have the bits of decoding, so that one may go on from any text."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from cases import DRAFTERS, Case
from check_models import DEVICE, SMALLEST, filled_cache, meta_of, model, random_tokens
from helpers import adapter_for, chain_of, random_prompts, texts_by, tiny_model, vanilla_texts
from strict_graphs import DanglingGraph, StrictGraphs, StrictRecorder

from kangaroo.cuda import layers as kernels
from kangaroo.cuda.backend import CudaBackend
from kangaroo.cuda.graphs import Graphs
from kangaroo.engine.cache import KVCache
from kangaroo.engine.engine import Engine
from kangaroo.engine.late_stepper import LateStepper
from kangaroo.engine.prefill import read
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.tree import Tree
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.models.target import TargetModel

slow = pytest.mark.slow
PROMPTS = random_prompts(5, 61)
SAMPLINGS = {"greedy": Sampling(), "t1": Sampling(temperature=1.0, seed=3)}
READ_AS = [("llama", torch.bfloat16, SMALLEST, 66)]
READ_AS += [pytest.param("qwen2", torch.float16, {}, x, marks=slow) for x in (63, 64, 129, 150)]


@cache
def vanilla_by_kernels(architecture: str, dtype: torch.dtype, sampling: str) -> Case:
    lm = by_kernels(architecture, dtype)
    texts = vanilla_texts(lm, PROMPTS, 5, SAMPLINGS[sampling])
    return Case(lm, adapter_for(lm, exit_layer=1), texts)


def by_kernels(
    architecture: str, dtype: torch.dtype, graphed: bool = False, layers: int = 4
) -> TargetModel:
    few = {"num_attention_heads": 2, "num_key_value_heads": 1}  # which the interpreter is faster at
    hf = tiny_model(architecture, dtype=dtype, num_hidden_layers=layers, **few)
    lm = TargetModel(hf.to(DEVICE))
    graphs = StrictGraphs() if graphed else None
    return lm.decode_by(CudaBackend(graphs, lm.sizes()))


def test_kangaroo_in_bfloat16_writes_vanillas_text_and_no_logits(monkeypatch):
    """Of a short prompt: a token takes the interpreter a tenth of a second."""
    calls, logits = [], TargetModel.logits
    monkeypatch.setattr(TargetModel, "logits", lambda self, x: calls.append(1) or logits(self, x))
    lm, prompts = by_kernels("llama", torch.bfloat16, layers=2), random_prompts(3)
    parts = AdapterHeadConfig(fused=True, feed_forward=True)
    engine = Engine(lm, chain_of(lm, adapter_for(lm, 1, parts), steps=2, threshold=0))
    assert texts_by(engine, prompts, 2) == vanilla_texts(lm, prompts, 2)
    assert len(calls) == 2  # it is read once for vanilla and once for Kangaroo


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the stand-in is for the CPU")
def test_graphs_record_the_kernels():
    """With the real graphs' rules: launches in a recording write nothing into memory of others."""
    x, weight = torch.randn(3, 8), torch.ones(8)
    there = torch.zeros(3, 8)

    def work():
        _, normed = kernels.add_and_norm(x, None, weight, 1e-5, None)
        kernels.add_and_norm(normed * 2, None, weight, 1e-5, out=there)

    replay = StrictRecorder()(work)
    wanted = there.clone()
    there.zero_()
    x *= 3
    replay()
    torch.testing.assert_close(there, wanted)
    there = None
    with pytest.raises(DanglingGraph):
        replay()


@pytest.mark.parametrize("is_needed", [True, False])
def test_kernels_that_nobody_needs_write_nothing_but_a_token_that_exists(is_needed, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape, **of: filled(x, shape, of))
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    lm, tokens_1T = model("qwen3", torch.bfloat16, **SMALLEST), random_tokens(1, 3)
    lm.decode_by(CudaBackend(None, lm.sizes()))
    cache = lm.new_cache(1, 64)
    x_1TD = lm.embed(tokens_1T)
    meta = lm.forward_meta(Tree.chain(3, lm.device), torch.zeros(1).long(), 3, cache.n_slots)
    lm.backend.skip_unless(torch.tensor([[False], [is_needed]], device=lm.device))
    try:
        x_1TD, _ = lm.run(x_1TD, cache, meta, range(lm.n_layers))
        ids_1T, _ = lm.choose(x_1TD)
        logits = lm.logits(x_1TD)
    finally:
        lm.backend.skip_unless(None)
    assert bool(x_1TD.isfinite().all()) == bool(logits.isfinite().all()) == is_needed
    assert any(keys.any() for keys in cache.keys) == is_needed
    assert is_needed or not ids_1T.any()
    assert not is_needed or torch.equal(ids_1T, logits.argmax(-1))


def filled(x: torch.Tensor, shape: tuple, options: dict) -> torch.Tensor:
    """Memory that nobody has written: no number, and no index."""
    dtype = options.get("dtype", x.dtype)
    rubbish = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max
    shape = shape[0] if isinstance(shape[0], torch.Size) else shape
    return torch.full(shape, rubbish, dtype=dtype, device=x.device)


@slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the stand-in is for the CPU")
@pytest.mark.parametrize("name", "vanilla kangaroo kangaroo-stops eagle kangaroo-tree".split())
def test_replayed_graphs_write_the_same_text(name):
    texts, recorded = [], Graphs.seconds
    for graphed in (False, True):
        lm = by_kernels("llama", torch.float16, graphed, layers=3)
        drafter = DRAFTERS[name](Case(lm, adapter_for(lm, exit_layer=1), []))
        engine = Engine(lm, drafter)
        texts += texts_by(engine, PROMPTS[:1], 3)
        assert isinstance(engine.session.stepper, LateStepper) == (graphed and "tree" not in name)
    assert texts[0] == texts[1] and Graphs.seconds > recorded


@slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_writes_vanillas_text(name, sampling):
    how = {"greedy": ("qwen2", torch.bfloat16), "t1": ("qwen3", torch.float16)}[sampling]
    case = vanilla_by_kernels(*how, sampling)
    engine = Engine(case.lm, DRAFTERS[name](case))
    assert texts_by(engine, PROMPTS, 5, SAMPLINGS[sampling], batch_size=2) == case.texts


@slow
@pytest.mark.parametrize("rows, nodes", [(2, 3), (8, 65)])
def test_a_pass_over_too_many_tokens_has_the_bits_of_a_row_alone(rows, nodes, monkeypatch):
    """520 tokens are more than a graph takes; 6 are recorded."""
    monkeypatch.setattr(TargetModel, "_eager", None)  # no module may run
    monkeypatch.setattr(TargetModel, "read_out", None)
    lm = model("llama", torch.bfloat16, **SMALLEST)
    parents = [max(0, (node - 1) // 3) for node in range(nodes)]
    tree = Tree(torch.tensor([parents], device=DEVICE), max_depth=4)
    tokens_BN, starts = random_tokens(rows, nodes), list(range(60, 60 + rows))

    def read(rows: slice, graphs: Graphs | None) -> torch.Tensor:
        lm.decode_by(CudaBackend(graphs, lm.sizes()))
        meta, part_BN = meta_of(lm, tree, starts[rows]), tokens_BN[rows]
        cache = filled_cache(lm, len(part_BN))
        return lm.logits(lm.run(lm.embed(part_BN), cache, meta, range(lm.n_layers))[0])

    graphs = StrictGraphs() if DEVICE.type == "cpu" else Graphs(DEVICE)
    together = read(slice(rows), graphs)
    assert torch.equal(read(slice(rows - 1, rows), None)[0], together[-1])


@pytest.mark.parametrize("name, dtype, options, length", READ_AS)
def test_a_prompt_has_the_same_bits_in_chunks_of_any_size_and_decoded(name, dtype, options, length):
    """And from graphs, of which one is for all rows and places."""
    lm, tokens_1T = model(name, dtype, **options), random_tokens(1, length)
    graphs = StrictGraphs() if DEVICE.type == "cpu" else Graphs(DEVICE)
    readings = []
    for borders, recorded in (
        ([0, length], None),
        ([0, 17, length - 6, length - 1, length], None),
        ([length - 16, length - 8, length], graphs),
    ):
        lm.decode_by(CudaBackend(recorded, lm.sizes()))
        cache, row = lm.new_cache(2, 192), 0 if recorded is None else 1
        if borders[0] > 0:  # goes on in what another one has read
            for mine, read_before in zip(keys_in(cache, row), readings[0][1:], strict=True):
                mine[: borders[0]] = read_before[: borders[0]]
        for start, stop in pairwise(borders):
            part_1T = tokens_1T[:, start:stop]
            if stop - start == 5:  # as a draft is verified
                start_1, tree = torch.tensor([start], device=lm.device), Tree.chain(5, lm.device)
                meta = lm.forward_meta(tree, start_1, stop, cache.n_slots)
                lm.run(lm.embed(part_1T), cache, meta, range(lm.n_layers))
            else:
                x_11D, *_ = read(lm, part_1T, start, cache, row, ())
        readings.append([lm.logits(x_11D), *keys_in(cache, row)])
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(*readings, strict=True))


def keys_in(cache: KVCache, row: int) -> list[torch.Tensor]:
    """Keys and values of one of two rows."""
    return [x.unflatten(0, (2, -1))[row] for x in (*cache.keys, *cache.values)]
