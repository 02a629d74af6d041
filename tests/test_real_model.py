"""The promise on a real model: in float32 every text is vanilla's, and vanilla's transformers'."""

import os
from pathlib import Path

import pytest

from kangaroo.data.chat import prompt_ids
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import Engine
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.evaluation.run import Baseline, EvaluateConfig, evaluate
from kangaroo.model import LM
from kangaroo.sampling import Sampling

ROOT = Path(__file__).parent.parent
ADAPTER = str(ROOT / "adapters/smollm2-135m")
SPEC_BENCH = Path(
    os.environ.get("SPEC_BENCH", ROOT.parent / "shared/spec_bench/question.jsonl")
)  # not ours to ship


@pytest.fixture(scope="module")
def target(smollm2):
    hf, tokenizer = smollm2
    return LM(hf), tokenizer


def prompts(tokenizer, bench, count):
    """First turns, spread over the bench."""
    questions = load_questions(bench)
    chosen = questions[:: len(questions) // count][:count]
    return [prompt_ids(tokenizer, [{"role": "user", "content": q.turns[0]}]) for q in chosen]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)])
def test_the_shipped_adapter_writes_what_vanilla_writes(target, sampling):
    lm, tokenizer = target
    some = prompts(tokenizer, BenchConfig(), 4)
    alone = Engine(lm, Vanilla()).generate(some, 16, sampling, batch_size=1)
    kangaroo = Engine(lm, KangarooConfig(adapter=ADAPTER, threshold=0.3).build(lm))
    ragged = kangaroo.generate(some, 16, sampling, batch_size=3)
    assert [g.tokens for g in ragged] == [g.tokens for g in alone]
    steps = sum(len(g.steps) for g in ragged)
    assert steps < 0.8 * sum(len(g.tokens) for g in ragged)  # it does speculate


def lossless(target, output, temperature, baselines, **settings):
    lm, tokenizer = target
    config = EvaluateConfig(
        output=str(output), sampling=Sampling(temperature=temperature), baselines=baselines,
        warmup=0, **settings,
    )  # fmt: skip
    drafter = KangarooConfig(adapter=ADAPTER, threshold=0.3).build(lm)
    names = {"model_name": "smollm2-135m", "drafter_name": "kangaroo"}
    return evaluate(lm, tokenizer, drafter, config, **names)["lossless"]


@pytest.mark.slow
def test_greedy_on_the_whole_demo_bench_and_equal_to_transformers(target, tmp_path):
    result = lossless(target, tmp_path, 0.0, list(Baseline), max_new_tokens=64)
    assert result["identical"] == result["turns"] == 82 and not result["forks"]
    assert result["hf_identical"] == 82


@pytest.mark.slow
def test_sampled_on_the_whole_demo_bench(target, tmp_path):
    result = lossless(target, tmp_path, 0.8, [Baseline.vanilla], max_new_tokens=64)
    assert result["identical"] == result["turns"] == 82 and not result["forks"]


@pytest.mark.slow
@pytest.mark.skipif(not SPEC_BENCH.exists(), reason="Spec-Bench's questions: set SPEC_BENCH=")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_spec_bench_cut_to_32_tokens(target, tmp_path, temperature):
    bench = BenchConfig(name="spec_bench", path=str(SPEC_BENCH), max_new_tokens=32)
    result = lossless(target, tmp_path, temperature, [Baseline.vanilla], bench=bench)
    assert result["identical"] == result["turns"] == 560 and not result["forks"]
