"""Recorded work is replayed with new inputs, where it may be, and never outlives its memory."""

import gc
import json
import weakref

import pytest
import torch
from helpers import adapter_for, graphed, random_prompts, recipe_of, texts_by, tiny, vanilla_texts
from scale_worker import train_tiny
from strict_graphs import CaptureError, DanglingGraph, StrictGraphs, StrictRecorder

from kangaroo.cuda import graphs as graphs_module
from kangaroo.cuda.graphs import Graphs
from kangaroo.drafters.draft_model import DraftModel
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import clock
from kangaroo.engine.cache import KVCache
from kangaroo.engine.engine import Engine
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.export import draft_model
from kangaroo.models.target import TargetModel
from kangaroo.training.checkpoint import METRICS

PROMPTS = random_prompts(5, 30, 9)


def cache() -> KVCache:
    return KVCache(1, 8, 1, 4, torch.float32, [torch.device("cpu")])


# ---- what the stand-in refuses, as CUDA would or should ----------------------------------------


WAITS = {
    "item": lambda x: x * x.sum().item(),
    "mask": lambda x: x[x > 0],
    "from the host": lambda x: x + torch.tensor([1.0]),
    "if": lambda x: x if x.any() else -x,
}


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


# recording and replaying


def test_work_is_recorded_once_and_replayed_with_new_inputs():
    graphs, own, runs = StrictGraphs(), cache(), []

    def work(x):
        runs.append(1)
        return (x + 1, x * 2)

    first = graphs((own,), ("a",), work, torch.tensor([1.0]))
    assert [t.item() for t in first] == [2, 2] and len(graphs.made) == 1
    warm = len(runs)
    second = graphs((own,), ("a",), work, torch.tensor([5.0]))
    assert [t.item() for t in second] == [6, 10] and len(runs) == warm
    graphs((own,), ("b",), work, torch.tensor([5.0]))
    graphs((own,), ("b",), work, torch.tensor([5.0, 6.0]))
    graphs((cache(),), ("b",), work, torch.tensor([5.0]))
    assert len(graphs.made) == 3  # and the last cache is gone already


def test_what_is_held_is_not_copied_again():
    graphs, own = StrictGraphs(), cache()
    for value in (1.0, 7.0):
        (held,) = graphs((own,), ("round",), None, torch.tensor([value]))
        (first,) = graphs((own,), ("first",), lambda x: (x + 1,), held)
        (second,) = graphs((own,), ("second",), lambda x, y: (x + y,), first, held)
        assert second.item() == 2 * value + 1
    _, _, last = graphs.made.values()
    assert last.inputs[0] is first and last.inputs[1] is held


def test_what_was_used_longest_ago_gives_way_and_few_graphs_are_enough():
    graphs, own = StrictGraphs(most=2), cache()
    for name in ("a", "b", "a", "c"):
        graphs((own,), (name,), lambda x: (x + 1,), torch.ones(1))
    assert [key[1] for key in graphs.made] == ["a", "c"]
    lm = tiny()
    lm.acceleration.graphs = StrictGraphs(most=3)
    engine = Engine(lm, Kangaroo(lm, adapter_for(lm), steps=4, threshold=0.3))
    assert texts_by(engine, PROMPTS, 12, batch_size=1) == vanilla_texts(tiny(), PROMPTS, 12)
    assert len(lm.acceleration.graphs.made) == 3


# caches come and go


def test_engines_made_and_dropped_in_turn_write_the_same_and_leave_nothing():
    lm = graphed(tiny())
    expected = vanilla_texts(tiny(), PROMPTS, 12)
    adapter = adapter_for(lm)
    for turn in range(4):
        drafter = Vanilla() if turn % 3 == 0 else Kangaroo(lm, adapter, 1 + turn % 3, 0.3)
        assert texts_by(Engine(lm, drafter), PROMPTS, 12, batch_size=1 + turn % 2) == expected
    del drafter
    gc.collect()
    assert not lm.acceleration.graphs.made and not lm.acceleration.graphs.watched


def test_a_cache_that_was_outgrown_is_freed_before_the_next_is_made(monkeypatch):
    """A draft model's, too."""
    lm = graphed(tiny())
    drafter = DraftModel(lm, TargetModel(draft_model(lm, adapter_for(lm))), 2)
    engine = Engine(lm, drafter)
    engine.generate(PROMPTS[:1], 10)
    old = [weakref.ref(engine.cache), weakref.ref(drafter.cache)]
    small, alive, create = set(lm.acceleration.graphs.made), [], KVCache.__init__

    def watched(self, *args, **kwargs):
        alive.append(old[0]() is not None)
        create(self, *args, **kwargs)

    monkeypatch.setattr(KVCache, "__init__", watched)
    engine.generate(PROMPTS[1:2], 100)
    assert alive and not any(alive) and old[1]() is None
    assert not small & set(lm.acceleration.graphs.made)
    large = set(lm.acceleration.graphs.made)
    engine.generate(PROMPTS[:1], 10)  # fits into the larger one
    made = lm.acceleration.graphs.made
    assert large <= set(made) and len({key[0] for key in made}) <= 3


def test_a_prompt_in_chunks_is_not_recorded():
    """Equal prompts in one batch: chunks of one shape, which differ in their row alone."""
    lm = graphed(tiny())
    prompts = random_prompts(40) * 2
    expected = vanilla_texts(tiny(), prompts, 12)
    engine = Engine(lm, Vanilla(), prefill_chunk=12)
    assert texts_by(engine, prompts, 12) == expected
    passes = [key for key in lm.acceleration.graphs.made if "verify" in key and "block" not in key]
    assert len(passes) == 1 and lm.acceleration.graphs.made[passes[0]].inputs[0].shape == (2, 1)


def test_recording_takes_none_of_the_steps_time(monkeypatch):
    seconds, strict = [0.0], StrictRecorder()

    def record(work):
        seconds[0] += 1000
        return strict(work)

    for module in (clock, graphs_module):
        monkeypatch.setattr(module.time, "perf_counter", lambda: seconds[0])
    lm = tiny()
    lm.acceleration.graphs = Graphs(lm.device, record)
    engine = Engine(lm, Kangaroo(lm, adapter_for(lm), 3, 0.0))
    (done,) = engine.generate(PROMPTS[:1], 20)
    assert seconds[0] >= 4000 and done.seconds == pytest.approx(0, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("device", range(max(1, torch.cuda.device_count())))
def test_cuda_graphs_write_what_eager_decoding_writes(device):
    def on_gpu() -> TargetModel:
        return TargetModel(tiny().hf.to(f"cuda:{device}"))

    texts = vanilla_texts(on_gpu(), PROMPTS, 40)
    lm = on_gpu().compile_for_decoding()
    adapter = adapter_for(lm, architecture=AdapterHeadConfig(fused=True))
    for drafter in (Vanilla(), Kangaroo(lm, adapter, 4, 0.3)):
        recorded = Graphs.seconds
        assert texts_by(Engine(lm, drafter), PROMPTS, 40, batch_size=2) == texts
        assert Graphs.seconds > recorded


@pytest.mark.gpu
def test_a_gpu_learns_what_a_cpu_learns(tmp_path):
    """In float32; sums of another order differ a little, and a draft may fall the other way."""
    recipes = [
        recipe_of(name="attention", exit_layers=[1]),
        recipe_of(name="fused", fused=True, draft_steps=2),
    ]
    losses = []
    for device in ("cpu", "cuda"):
        lm = TargetModel(tiny().hf.to(device)).compile_for_decoding()
        train_tiny(tmp_path / device, {}, lm=lm, recipes=recipes)
        lines = (tmp_path / device / METRICS).read_text().splitlines()
        values = (pair for line in lines for pair in json.loads(line).items())
        losses.append([value for name, value in values if name.endswith("/loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
