"""Drafters on the kernels write what vanilla decoding on them writes, in half precision too; graphs
record the kernels.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cases import DRAFTERS, Case
from helpers import adapter_for, random_prompts, tiny_model, vanilla_texts
from kernel_cases import DEVICE
from strict_graphs import DanglingGraph, StrictGraphs, StrictRecorder

from kangaroo.cuda import layers as kernels
from kangaroo.engine.acceleration import Acceleration
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel

slow = pytest.mark.slow
PROMPTS = random_prompts(5, 61)


SAMPLINGS = {"greedy": Sampling(), "t1": Sampling(temperature=1.0, seed=3)}


@cache
def vanilla_by_kernels(architecture: str, dtype: torch.dtype, sampling: str) -> Case:
    """Five tokens of each text."""
    lm = by_kernels(architecture, dtype)
    texts = vanilla_texts(lm, PROMPTS, 5, SAMPLINGS[sampling])
    return Case(lm, adapter_for(lm, exit_layer=1), texts)


def by_kernels(
    architecture: str, dtype: torch.dtype, graphed: bool = False, layers: int = 4
) -> TargetModel:
    few = {"num_attention_heads": 2, "num_key_value_heads": 1}  # which the interpreter is faster at
    lm = TargetModel(
        tiny_model(architecture, dtype=dtype, num_hidden_layers=layers, **few).to(DEVICE)
    )
    graphs = StrictGraphs() if graphed else None
    return lm.decode_by(Acceleration(sizes=lm.sizes(), graphs=graphs, kernels=kernels))


def assert_equal(case: Case, name: str, sampling: str = "greedy") -> None:
    new_tokens = len(case.texts[0]) - len(PROMPTS[0])
    engine = Engine(case.lm, DRAFTERS[name](case))
    done = engine.generate(PROMPTS, new_tokens, SAMPLINGS[sampling], batch_size=2)
    assert [p + g.tokens for p, g in zip(PROMPTS, done, strict=True)] == case.texts


def test_kangaroo_in_bfloat16_writes_vanillas_text_and_no_logits(monkeypatch):
    lm, logits, logits_of = by_kernels("llama", torch.bfloat16, layers=3), [], TargetModel.logits
    monkeypatch.setattr(
        TargetModel, "logits", lambda self, x: logits.append(1) or logits_of(self, x)
    )
    case = Case(lm, adapter_for(lm, exit_layer=1), vanilla_texts(lm, PROMPTS, 3))
    assert_equal(case, "kangaroo-fused-layer")
    assert len(logits) == 2 * len(PROMPTS)  # each read once for vanilla and once for Kangaroo


@slow
@pytest.mark.parametrize(
    "name", ["kangaroo-vocabulary", "kangaroo-stops", "draft-model", "draft_verify"]
)
def test_what_is_chosen_without_logits_is_what_they_say(name, monkeypatch):
    lm, rounds, logits = by_kernels("llama", torch.float16), [], []
    logits_of = TargetModel.logits
    monkeypatch.setattr(
        TargetModel, "logits", lambda self, x: logits.append(1) or logits_of(self, x)
    )
    for chooses in (True, False):
        if not chooses:
            monkeypatch.setattr(TargetModel, "choose", lambda self, x_BND: None)
            monkeypatch.setattr(DraftHead, "choose", lambda self, x_MD: None)
        drafter = DRAFTERS[name](Case(lm, adapter_for(lm, exit_layer=1), []))
        (done,) = Engine(lm, drafter).generate(PROMPTS[:1], 4)
        rounds.append([(step.tokens, step.drafted, step.accepted) for step in done.steps])
        assert (len(logits) == 1) == chooses  # the prompt's
    assert rounds[0] == rounds[1]


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


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the stand-in is for the CPU")
@pytest.mark.parametrize(
    "name",
    [
        "vanilla",
        *(pytest.param(x, marks=slow) for x in ("kangaroo-stops", "eagle", "kangaroo-tree")),
    ],
)
def test_replayed_graphs_write_the_same_text(name):
    texts = []
    for graphed in (False, True):
        lm = by_kernels("llama", torch.float16, graphed, layers=3)
        drafter = DRAFTERS[name](Case(lm, adapter_for(lm, exit_layer=1), []))
        (done,) = Engine(lm, drafter).generate(PROMPTS[:1], 3)
        texts.append(done.tokens)
        if graphed:
            assert sum(lm.acceleration.graphs.calls.values()) > 0
    assert texts[0] == texts[1]


@slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_writes_vanillas_text(name, sampling):
    how = {"greedy": ("qwen2", torch.bfloat16), "t1": ("qwen3", torch.float16)}[sampling]
    assert_equal(vanilla_by_kernels(*how, sampling), name, sampling)
