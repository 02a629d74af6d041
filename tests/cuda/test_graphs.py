"""Recorded work is replayed with new inputs, where it may be, and never outlives its memory; a
round is a few launches, and few are ever recorded."""

import gc
import itertools
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from cases import DRAFTERS, Case
from helpers import adapter_for, graphed, random_prompts, recipe_of, texts_by, tiny, vanilla_texts
from scale_worker import train_tiny
from strict_graphs import CaptureError, DanglingGraph, StrictGraphs, StrictRecorder, Tape
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kangaroo import cuda
from kangaroo.cuda import graphs as graphs_module
from kangaroo.cuda import launching
from kangaroo.cuda.backend import CudaBackend
from kangaroo.cuda.graphs import Graphs
from kangaroo.drafters.draft_model import DraftModel
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import clock
from kangaroo.engine.cache import KVCache
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.session import Session
from kangaroo.engine.tree import Tree
from kangaroo.engine.warm_up import warm_up
from kangaroo.heads.export import draft_model
from kangaroo.models.target import TargetModel
from kangaroo.training.results import read_metrics

PROMPTS = random_prompts(5, 30, 9)
LAUNCHES = {"vanilla": (1, 4), "kangaroo": (1, 4), "kangaroo-stops": (8, 30)}
LAUNCHES |= {"hybrid-tree": (11, 47), "eagle-tree": (11, 34)}
WAITS = {
    "item": lambda x: x * x.sum().item(),
    "mask": lambda x: x[x > 0],
    "from the host": lambda x: x + torch.tensor([1.0]),
    "if": lambda x: x if x.any() else -x,
    "list": lambda x: x * x.tolist()[0],
    "array": lambda x: x * x.numpy()[0],
    "shared with the host": lambda x: x + torch.from_numpy(np.ones(2, np.float32)),
}


def cache() -> KVCache:
    return KVCache.empty(1, 8, 1, 4, torch.float32, [torch.device("cpu")])


@pytest.mark.parametrize("work", WAITS.values(), ids=WAITS)
def test_work_that_waits_for_the_device_cannot_be_recorded(work):
    with pytest.raises(CaptureError):
        StrictRecorder()(lambda: work(torch.ones(2)))


def test_a_replay_on_freed_or_moved_memory_fails():
    there = torch.ones(3)
    replay = StrictRecorder()(lambda: there + 1)
    replay()
    there.untyped_storage().resize_(1 << 20)
    with pytest.raises(DanglingGraph, match="moved"):
        replay()
    there = None
    gc.collect()
    with pytest.raises(DanglingGraph, match="freed"):
        replay()


def test_work_is_recorded_once_and_replayed_with_new_inputs():
    graphs, own, runs = StrictGraphs(), cache(), []

    def work(x):
        runs.append(1)
        return (x + 1, x * 2)

    first = graphs((own,), ("a",), work, torch.tensor([1.0]))
    assert [t.item() for t in first] == [2, 2] and len(graphs.recorded) == 1
    warm = len(runs)
    second = graphs((own,), ("a",), work, torch.tensor([5.0]))
    assert [t.item() for t in second] == [6, 10] and len(runs) == warm
    graphs((own,), ("b",), work, torch.tensor([5.0]))
    graphs((own,), ("b",), work, torch.tensor([5.0, 6.0]))
    graphs((cache(),), ("b",), work, torch.tensor([5.0]))
    assert len(graphs.recorded) == 3  # and the last cache is gone already


def test_what_was_used_longest_ago_gives_way_and_few_graphs_are_enough():
    graphs, own = StrictGraphs(most=2), cache()
    for name in ("a", "b", "a", "c"):
        graphs((own,), (name,), lambda x: (x + 1,), torch.ones(1))
    assert [key[1] for key in graphs.recorded] == ["a", "c"]
    lm = tiny()
    lm.decode_by(CudaBackend(StrictGraphs(most=3)))
    engine = Engine(lm, helpers.chain_of(lm, adapter_for(lm), steps=4, threshold=0.3))
    assert texts_by(engine, PROMPTS[:1], 6) == vanilla_texts(tiny(), PROMPTS[:1], 6)
    assert len(lm.backend.graphs.recorded) == 3


def test_a_cache_that_was_outgrown_is_freed_before_the_next_is_made(monkeypatch):
    lm = graphed(tiny())
    drafter = DraftModel(lm, TargetModel(draft_model(lm, adapter_for(lm))), 2)
    engine = Engine(lm, drafter)
    engine.generate(PROMPTS[:1], 10)
    old = [weakref.ref(engine.cache), weakref.ref(drafter.cache)]
    small, alive, create = set(lm.backend.graphs.recorded), [], KVCache.__init__

    def watched(self, *args, **kwargs):
        alive.append(old[0]() is not None)
        create(self, *args, **kwargs)

    monkeypatch.setattr(KVCache, "__init__", watched)
    engine.generate(PROMPTS[1:2], 100)
    assert alive and not any(alive) and old[1]() is None
    assert not small & set(lm.backend.graphs.recorded)
    large = set(lm.backend.graphs.recorded)
    engine.generate(PROMPTS[:1], 10)  # fits into the larger one
    recorded = lm.backend.graphs.recorded
    assert large <= set(recorded) and len({key[0] for key in recorded}) <= 3


def test_a_prompt_in_chunks_is_not_recorded_without_kernels():
    """Equal prompts in one batch: chunks of one shape, which differ in their row alone."""
    lm = graphed(tiny())
    prompts = random_prompts(40) * 2
    expected = vanilla_texts(tiny(), prompts, 12)
    engine = Engine(lm, Vanilla(), prefill_chunk=12)
    assert texts_by(engine, prompts, 12) == expected
    recorded = lm.backend.graphs.recorded
    (key,) = recorded
    assert key[1] == "step" and recorded[key].inputs[0].shape == (2, 4)


@pytest.mark.parametrize("threshold, recorded", [(0.0, 2000), (0.3, 4000)])
def test_recording_takes_none_of_the_steps_time(monkeypatch, threshold, recorded):
    seconds, strict = [0.0], StrictRecorder()

    def record(work):
        seconds[0] += 1000
        return strict(work)

    for module in (clock, graphs_module):
        monkeypatch.setattr(module.time, "perf_counter", lambda: seconds[0])
    lm = tiny()
    lm.decode_by(CudaBackend(Graphs(lm.device, record)))
    engine = Engine(lm, helpers.chain_of(lm, adapter_for(lm), 3, threshold))
    (done,) = engine.generate(PROMPTS[:1], 20)
    assert seconds[0] >= recorded and done.seconds == pytest.approx(0, abs=1e-6)


def written_out(session: Session, prompts: list[list[int]], **options) -> None:
    """Steps until the texts of these prompts, one a row, have ended."""
    for row, prompt in enumerate(prompts):
        session.admit(row, Request(prompt, ignore_eos=True, **options))
    while not all(session.batch.done):
        session.step()


def growing(session: Session, seed: int) -> None:
    """Some steps at many lengths of a text, from 1 to 2000 slots."""
    (text,) = random_prompts(2000, seed=seed)
    for length in (1, 150, 300, 700, 1300, 1980):
        written_out(session, [text[:length]], max_new_tokens=8)


@pytest.mark.parametrize(
    "name, most", [("kangaroo", 4), ("kangaroo-stops", 60), ("hybrid-tree", 100)]
)
def test_a_growing_text_is_recorded_anew_at_powers_of_two_alone(name, most):
    lm = graphed(tiny(max_position_embeddings=4096, num_hidden_layers=3))
    engine = Engine(lm, DRAFTERS[name](Case(lm, adapter_for(lm), [])))
    session = engine.open(1, 2000, Sampling())
    batch = session.batch
    recorded = lm.backend.graphs.recorded
    growing(session, seed=0)
    shapes = [part for key in recorded for part in key if isinstance(part, torch.Size)]
    extents = {shape[-1] for shape in shapes if len(shape) == 4 and shape[1] == 1}  # of masks
    extents |= {key[3] for key in recorded if key[1] == "step"}
    assert extents == {256, 512, 1024, batch.n_slots} and len(recorded) <= most
    before = set(recorded)
    growing(session, seed=1)
    further = len(set(recorded) - before)
    assert further <= (0 if name == "kangaroo" else most // 4)  # of other widths


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_round_is_few_launches(name, monkeypatch):
    """Of graphs, and of other operators that give something new."""
    replays, others = [], []
    replayed = Tape.replay

    def replay(self):
        replays.append(self)
        with _disable_current_modes():
            replayed(self)

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
            if all(alias.is_write for alias in aliases):  # else it is a view
                others.append(func)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(Tape, "replay", replay)
    lm = graphed(tiny(num_hidden_layers=3))
    engine = Engine(lm, DRAFTERS[name](Case(lm, adapter_for(lm), [])))
    session = engine.open(1, 200, Sampling(temperature=0.7))
    session.admit(0, Request(random_prompts(60)[0], 140))
    counts = []
    for _ in range(24):
        before = len(lm.backend.graphs.recorded)
        replays.clear(), others.clear()
        with Launches():
            session.step()
        if len(lm.backend.graphs.recorded) == before:
            counts.append((len(replays), len(others)))
    assert len(counts) > 6
    graphs, operators = LAUNCHES[name]
    steady = counts[1:]  # a step is launched ahead from then on
    assert all(x <= graphs and y <= operators for x, y in steady), counts


def test_what_was_warmed_up_is_not_recorded_again():
    lm, rows, longest = graphed(tiny(num_hidden_layers=3)), 2, 300
    engine = Engine(lm, helpers.chain_of(lm, adapter_for(lm), 2, 0.0), prefix_cache=True)
    warm_up(engine, rows, longest)
    recorded = set(lm.backend.graphs.recorded)
    session = engine.open(rows, longest, Sampling())
    for sampling, length in itertools.product((Sampling(), Sampling(1.4)), (5, 270)):
        prompts = random_prompts(*[length] * rows)
        written_out(session, prompts, max_new_tokens=9, sampling=sampling)
    assert recorded and set(lm.backend.graphs.recorded) == recorded
    native = Engine(tiny().compile_for_decoding(), Vanilla())
    warm_up(native, 2, 100)
    assert native.cache is None  # where nothing is recorded, nothing is done


def test_a_target_on_several_devices_is_told_what_serves_it_better(caplog):
    lm = tiny()
    lm.layer_devices[2:] = [torch.device("cuda:1")] * 2
    assert not lm.compile_for_decoding().backend.is_compiled
    assert "lies on 2 devices" in caplog.text and "vLLM" in caplog.text


@pytest.mark.gpu
def test_a_gpu_learns_what_a_cpu_learns(tmp_path):
    """In float32; sums of another order differ a little, and a draft may fall the other way."""
    recipes = [recipe_of(exit_layers=[1]), recipe_of(name="fused", fused=True, draft_steps=2)]
    losses = []
    for device in ("cpu", "cuda"):
        lm = TargetModel(tiny().hf.to(device)).compile_for_decoding()
        train_tiny(tmp_path / device, {}, lm=lm, recipes=recipes)
        values = (pair for row in read_metrics(tmp_path / device) for pair in row.items())
        losses.append([value for name, value in values if name.endswith("/loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_where_programmatic_edges_cannot_be_recorded_kernels_do_without(monkeypatch, caplog):
    monkeypatch.setenv(launching.NO_PDL, "")
    calls = []

    def refuse_edges(work):
        calls.append(work)
        if not os.environ[launching.NO_PDL]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = SimpleNamespace(record=refuse_edges)
    cuda.record(graphs, print)
    assert calls == [print] * 2 and os.environ[launching.NO_PDL] == "1"
    assert "operation not permitted when stream is capturing" in caplog.text
    cuda.record(graphs, print)
    assert len(calls) == 3


def test_kernels_read_a_chain_without_a_mask_and_modules_get_one():
    lm = tiny()
    tree = Tree.chain(3, lm.device)
    start_B = torch.tensor([5, 90])
    masked = lm.forward_meta(tree, start_B, used=93, n_slots=192)
    lm.backend.attends_by_position = True
    bare = lm.forward_meta(tree, start_B, used=93, n_slots=192)
    assert bare.bias_R1TE is None and masked.bias_R1TE is not None
    assert torch.equal(bare.within(0).bias_R1TE, masked.bias_R1TE)
    assert torch.equal(bare.within(64).bias_R1TE, masked.within(64).bias_R1TE)
    assert lm.chunk(0, 9, row=0, n_slots=9).within(0).bias_R1TE is None  # a whole text


def test_stored_costs_are_those_of_these_kernels_and_their_compiler(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    machine = CudaBackend(graphs=None).machine(torch.device("cuda"))
    triton = pytest.importorskip("triton")
    assert machine[0] == "card" and f"torch {torch.__version__}" in machine
    assert f"triton {triton.__version__}" in machine
    file = Path(cuda.__file__).with_name("kernels.py")
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"\n" * (self == file))
    assert CudaBackend(graphs=None).machine(torch.device("cuda"))[:-1] == machine[:-1]
    assert CudaBackend(graphs=None).machine(torch.device("cuda"))[-1] != machine[-1]
