"""The promise on a real model: in float32 every text is vanilla's, and vanilla's transformers'."""

import itertools

import pytest
from commands import ROOT
from composing import DRAFTERS, composed
from omegaconf import OmegaConf

from kangaroo import KangarooConfig, Sampling
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.evaluation.run import EvaluateConfig, Evaluator, MethodSpec
from kangaroo.models.prompts import prompt_ids
from kangaroo.models.target import TargetModel

ADAPTER = str(ROOT / "adapters/smollm2-135m")
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=5)}
# but those for which nothing trained is shipped
SHIPPED = [f"drafter={name}" for name in sorted(set(DRAFTERS) - {"vanilla", "block", "eagle3"})]
SHIPPED.append(f"drafter=kangaroo drafter.adapter={ADAPTER}-fused")
FAST = SHIPPED[-1], *(f"drafter={x}" for x in ("kangaroo_tree", "hybrid", "cascade"))


@pytest.fixture(scope="module")
def target(smollm2):
    hf, tokenizer = smollm2
    return TargetModel(hf).compile_for_decoding(), tokenizer


@pytest.fixture(scope="module")
def by_vanilla(target):
    """Some prompts, and by sampling what vanilla decoding writes after each alone."""
    lm, tokenizer = target
    turns = [question.turns[0] for question in load_questions(BenchConfig())[6:38:31]]  # short
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": turn}]) for turn in turns]
    texts = {}
    for name, sampling in SAMPLINGS.items():
        done = Engine(lm, Vanilla()).generate(prompts, 12, sampling, batch_size=1)
        texts[name] = [generation.tokens for generation in done]
    return prompts, texts


@pytest.mark.parametrize(
    "options, sampling",
    [
        pytest.param(*case, marks=() if case[0] in FAST else pytest.mark.slow)
        for case in zip(SHIPPED, itertools.cycle(SAMPLINGS))
    ],
)
def test_every_method_writes_what_vanilla_writes_with_what_is_shipped(
    target, by_vanilla, monkeypatch, options, sampling
):
    monkeypatch.chdir(ROOT)
    lm, _ = target
    prompts, texts = by_vanilla[0], by_vanilla[1][sampling]
    config = OmegaConf.to_object(composed("evaluate", *options.split()).drafter)
    if hasattr(config, "threshold"):  # whether a draft pays here is another question
        config.threshold = 0.3
    ragged = Engine(lm, config.build(lm)).generate(prompts, 12, SAMPLINGS[sampling], batch_size=2)
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
    (summary,) = Evaluator(lm, tokenizer, [method], config, model_name="smollm2-135m").finish()
    result = summary["lossless"]
    assert result["turns"] == result["identical"] == result["hf_identical"] == 82
