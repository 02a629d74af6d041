"""The promise on a real model: in float32 every text is vanilla's, and vanilla's transformers'."""

import itertools
from functools import cache

import pytest
from commands import ROOT
from composing import DRAFTERS, composed
from omegaconf import OmegaConf

from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.evaluation.config import EvaluateConfig, MethodSpec
from kangaroo.evaluation.run import Evaluator
from kangaroo.models.prompts import prompt_ids
from kangaroo.models.target import TargetModel

ADAPTER = str(ROOT / "adapters/smollm2-135m")
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=5)}
# but block, for which nothing trained is shipped
SHIPPED = [f"drafter={name}" for name in sorted(set(DRAFTERS) - {"vanilla", "block"})]
SHIPPED.append(f"drafter=kangaroo drafter.adapter={ADAPTER}-fused")


@pytest.fixture(scope="module")
def target(smollm2):
    hf, tokenizer = smollm2
    return TargetModel(hf).compile_for_decoding(), tokenizer


def prompts(tokenizer, bench, count):
    """First turns, spread over the bench."""
    questions = load_questions(bench)
    chosen = questions[:: len(questions) // count][:count]
    return [prompt_ids(tokenizer, [{"role": "user", "content": q.turns[0]}]) for q in chosen]


@pytest.fixture(scope="module")
def by_vanilla(target):
    """Some prompts, and what vanilla decoding writes after each alone."""

    @cache
    def decoded(sampling):
        lm, tokenizer = target
        some = prompts(tokenizer, BenchConfig(), 3)[:2]
        done = Engine(lm, Vanilla()).generate(some, 12, SAMPLINGS[sampling], batch_size=1)
        return some, [g.tokens for g in done]

    return decoded


@pytest.mark.parametrize(
    "options, sampling", list(zip(SHIPPED, itertools.cycle(SAMPLINGS), strict=False))
)
def test_every_method_writes_what_vanilla_writes_with_what_is_shipped(
    target, by_vanilla, monkeypatch, options, sampling
):
    monkeypatch.chdir(ROOT)
    lm, _ = target
    some, texts = by_vanilla(sampling)
    config = OmegaConf.to_object(composed("evaluate", *options.split()).drafter)
    if hasattr(config, "threshold"):  # whether a draft pays here is another question
        config.threshold = 0.3
    ragged = Engine(lm, config.build(lm)).generate(some, 12, SAMPLINGS[sampling], batch_size=2)
    assert [g.tokens for g in ragged] == texts
    steps = [step for g in ragged for step in g.steps]
    assert sum(step.drafted for step in steps) > 0
    assert len(steps) < sum(map(len, texts)) or "drafter.adapter" not in options


@pytest.mark.slow
def test_vanilla_on_the_whole_demo_bench_is_transformers(target, tmp_path):
    """And Kangaroo, one text at a time: the evaluation itself, in float32."""
    lm, tokenizer = target
    config = EvaluateConfig(output=str(tmp_path), warmup=0, max_new_tokens=32)
    method = MethodSpec("kangaroo", KangarooConfig(adapter=ADAPTER).build(lm))
    evaluator = Evaluator(lm, tokenizer, [method], config, model_name="smollm2-135m")
    (summary,) = evaluator.finish()
    result = summary["lossless"]
    assert result["turns"] == result["identical"] == result["hf_identical"] == 82
