"""Recorded work is replayed with new inputs, and only where it may be."""

import pytest
import torch
from helpers import CpuGraphs, adapter_for, graphed, random_prompts, tiny, vanilla_texts

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import Engine
from kangaroo.graphs import Graphs

PROMPTS = random_prompts(5, 30, 9)


def count_calls(graphs: Graphs) -> list[tuple]:
    """The keys of all calls from now on."""
    keys = []

    class Counting(CpuGraphs):
        def __call__(self, key, work, *inputs):
            keys.append(key)
            return super().__call__(key, work, *inputs)

    graphs.__class__ = Counting
    return keys


@torch.no_grad()
def test_work_is_recorded_once_and_replayed_with_new_inputs():
    graphs, runs = CpuGraphs(), []

    def work(x):
        runs.append(1)
        return (x + 1, x * 2)

    first = graphs((0, "a"), work, torch.tensor([1.0]))
    assert [t.item() for t in first] == [2, 2] and len(graphs.made) == 1
    second = graphs((0, "a"), work, torch.tensor([5.0]))
    assert [t.item() for t in second] == [6, 10]
    assert [t.item() for t in first] == [2, 2]  # not overwritten
    graphs((0, "b"), work, torch.tensor([5.0]))
    assert len(graphs.made) == 2


@torch.no_grad()
def test_work_inside_work_becomes_part_of_it():
    graphs = CpuGraphs()

    def outer(x):
        return graphs((0, "inner"), lambda y: (y + 1,), x)

    assert graphs((0, "outer"), outer, torch.tensor([1.0]))[0].item() == 2
    assert set(graphs.made) == {(0, "outer")}


def test_few_shapes_are_recorded_and_replayed_for_texts_of_all_lengths():
    lm = graphed(tiny())
    keys = count_calls(lm.graphs)
    engine = Engine(lm, Kangaroo(lm, adapter_for(lm), steps=4, threshold=0.3))
    done = engine.generate(PROMPTS, 60, batch_size=1)
    steps = sum(len(g.steps) for g in done)
    assert len(keys) > 2 * steps  # every verification, the shallow passes, the draft tokens
    assert len(lm.graphs.made) < 20


def test_engines_of_one_model_do_not_share_what_was_recorded():
    lm = graphed(tiny())
    expected = vanilla_texts(tiny(), PROMPTS, 20)
    engines = [Engine(lm, Vanilla()), Engine(lm, Kangaroo(lm, adapter_for(lm), 4, 0.0))] * 2
    for engine in engines:  # their caches differ, and grow with the second prompt
        done = engine.generate(PROMPTS, 20, batch_size=1)
        assert [p + g.tokens for p, g in zip(PROMPTS, done, strict=True)] == expected


def test_a_cache_that_was_outgrown_is_forgotten():
    lm = graphed(tiny())
    engine = Engine(lm, Vanilla())
    engine.generate(PROMPTS[:1], 10)
    small = {key[0] for key in lm.graphs.made}
    engine.generate(PROMPTS[1:2], 10)
    large = {key[0] for key in lm.graphs.made}
    assert len(small) == len(large) == 1 and engine.cache.n_slots >= 40
    engine.generate(PROMPTS[:1], 10)  # fits into the larger one
    assert {key[0] for key in lm.graphs.made} == large


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("parts", [{}, {"fused": True}], ids=str)
def test_cuda_graphs_write_what_eager_decoding_writes(parts):
    from kangaroo.adapter import Architecture
    from kangaroo.model import LM

    def on_gpu() -> LM:
        return LM(tiny().hf.to("cuda"))

    texts = vanilla_texts(on_gpu(), PROMPTS, 40)
    lm = on_gpu().compile_for_decoding()
    assert lm.graphs is not None
    adapter = adapter_for(lm, architecture=Architecture(**parts)).to("cuda")
    for drafter in (Vanilla(), Kangaroo(lm, adapter, 4, 0.3)):
        done = Engine(lm, drafter).generate(PROMPTS, 40, batch_size=2)
        assert [p + g.tokens for p, g in zip(PROMPTS, done, strict=True)] == texts
    assert lm.graphs.made
