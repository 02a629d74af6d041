"""The promise on a real model: in float32 every text is vanilla's, and vanilla's transformers'."""

import os
from pathlib import Path

import pytest

from kangaroo.data.chat import Message, prompt_ids
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import Engine
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.evaluation.run import EvaluateConfig, evaluate
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
    return LM(hf).compile_for_decoding(), tokenizer


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
    assert steps < sum(len(g.tokens) for g in ragged)  # it does speculate


def conversations(target, engine, bench, new_tokens, sampling):
    """Tokens of every turn of a bench, the engine's own answers in the prompts, many at a time."""
    _, tokenizer = target
    questions = load_questions(bench)
    messages = [[Message(role="user", content=q.turns[0])] for q in questions]
    written = {}
    for turn in range(2):
        open_ = [i for i, q in enumerate(questions) if len(q.turns) > turn]
        prompts = [prompt_ids(tokenizer, messages[i]) for i in open_]
        seeds = [1000 * questions[i].question_id + turn for i in open_]
        done = engine.generate(prompts, new_tokens, sampling, batch_size=16, seeds=seeds)
        for i, generation in zip(open_, done, strict=True):
            written[i, turn] = generation.tokens
            answer = tokenizer.decode(generation.tokens, skip_special_tokens=True)
            messages[i].append(Message(role="assistant", content=answer))
            if len(questions[i].turns) > turn + 1:
                messages[i].append(Message(role="user", content=questions[i].turns[turn + 1]))
    return written


def assert_lossless(target, bench, new_tokens, temperature):
    lm, _ = target
    sampling = Sampling(temperature=temperature)
    drafter = KangarooConfig(adapter=ADAPTER, threshold=0.3).build(lm)
    vanilla = conversations(target, Engine(lm, Vanilla()), bench, new_tokens, sampling)
    kangaroo = conversations(target, Engine(lm, drafter), bench, new_tokens, sampling)
    assert kangaroo == vanilla
    return len(vanilla)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_whole_demo_bench(target, temperature):
    assert assert_lossless(target, BenchConfig(), 64, temperature) == 82


@pytest.mark.slow
def test_vanilla_on_the_whole_demo_bench_is_transformers(target, tmp_path):
    """And Kangaroo, one text at a time: the evaluation itself, in float32."""
    lm, tokenizer = target
    config = EvaluateConfig(output=str(tmp_path), warmup=0, max_new_tokens=32)
    drafter = KangarooConfig(adapter=ADAPTER).build(lm)
    names = {"model_name": "smollm2-135m", "drafter_name": "kangaroo"}
    result = evaluate(lm, tokenizer, drafter, config, **names)["lossless"]
    assert result["turns"] == result["identical"] == result["hf_identical"] == 82


@pytest.mark.slow
@pytest.mark.skipif(not SPEC_BENCH.exists(), reason="Spec-Bench's questions: set SPEC_BENCH=")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_spec_bench_cut_to_32_tokens(target, temperature):
    bench = BenchConfig(name="spec_bench", path=str(SPEC_BENCH))
    assert assert_lossless(target, bench, 32, temperature) == 560
