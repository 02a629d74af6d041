"""The promise on a real model: in float32 every text is vanilla's, and vanilla's transformers'."""

import itertools
from functools import cache

import pytest
from assistant import assistant
from commands import ROOT
from composing import DRAFTERS, composed
from omegaconf import OmegaConf

from kangaroo.drafters.draft_model import DraftModelConfig
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.evaluation.config import EvaluateConfig, MethodSpec
from kangaroo.evaluation.methods import generate
from kangaroo.evaluation.run import Evaluator
from kangaroo.evaluation.speed.trials import write_by_engine
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.export import draft_model
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.models.target import TargetModel

ADAPTER = str(ROOT / "adapters/smollm2-135m")
FUSED = f"{ADAPTER}-fused"
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=5)}
# but vanilla, and EAGLE and block, for which nothing trained is shipped
OTHERS = {"vanilla", "eagle", "block"}
SHIPPED = sorted(set(DRAFTERS) - OTHERS)


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
        some = prompts(tokenizer, BenchConfig(), 3)
        done = Engine(lm, Vanilla()).generate(some, 12, SAMPLINGS[sampling], batch_size=1)
        return some, [g.tokens for g in done]

    return decoded


# in turn; the whole demo bench, a slow test, is decoded both ways by every method
@pytest.mark.parametrize(
    "name, sampling", list(zip(SHIPPED, itertools.cycle(SAMPLINGS), strict=False))
)
def test_every_method_writes_what_vanilla_writes_with_what_is_shipped(
    target, by_vanilla, monkeypatch, name, sampling
):
    monkeypatch.chdir(ROOT)
    lm, _ = target
    some, texts = by_vanilla(sampling)
    config = OmegaConf.to_object(composed("evaluate", f"drafter={name}").drafter)
    if hasattr(config, "threshold"):  # whether a draft pays here is another question
        config.threshold = 0.3
    ragged = Engine(lm, config.build(lm)).generate(some, 12, SAMPLINGS[sampling], batch_size=2)
    assert [g.tokens for g in ragged] == texts
    steps = [step for g in ragged for step in g.steps]
    assert sum(step.drafted for step in steps) > 0


@pytest.mark.parametrize("method", ["prompt lookup", "draft model"])
def test_rounds_are_those_of_transformers(target, method):
    """The same drafts and the same acceptance, by an implementation that is not ours."""
    lm, tokenizer = target
    if method == "prompt lookup":
        drafter = PromptLookup(max_matching_ngram_size=3, num_pred_tokens=5)
        speculation = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 3}
    else:
        adapter, _ = adapter_files.load(ADAPTER, lm, Adapter, vocabulary=0)
        drafter = DraftModelConfig(adapter=ADAPTER, steps=3, threshold=0).build(lm)
        model = assistant(draft_model(lm, adapter))
        config = model.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = 3, "constant"
        config.assistant_confidence_threshold = 0.0
        speculation = {"assistant_model": model}
    accepted = 0
    for prompt in prompts(tokenizer, BenchConfig(), 2):
        ours = write_by_engine(Engine(lm, drafter), prompt, 20)
        # theirs drafts before its prefill, ours after: so it begins after the token of ours
        theirs = generate(lm, [*prompt, ours.tokens[0]], 19, **speculation)
        assert ours.tokens[1:] == theirs.tokens
        written = [len(step.tokens) for step in ours.steps[1:]]
        assert written == [len(step.tokens) for step in theirs.steps]
        accepted += 19 - len(written)
    assert accepted > 4


@pytest.mark.parametrize("adapter, sampling", [(ADAPTER, "sampled"), (FUSED, "greedy")])
def test_the_shipped_adapters_write_what_vanilla_writes(target, by_vanilla, adapter, sampling):
    lm, _ = target
    some, texts = by_vanilla(sampling)
    kangaroo = Engine(lm, KangarooConfig(adapter=adapter, threshold=0.3).build(lm))
    ragged = kangaroo.generate(some, 12, SAMPLINGS[sampling], batch_size=3)
    assert [g.tokens for g in ragged] == texts
    # beside others drafting may not pay, where arithmetic is slow; alone it does speculate
    (alone,) = kangaroo.generate(some[:1], 12, SAMPLINGS[sampling], batch_size=1)
    assert alone.tokens == texts[0] and len(alone.steps) < len(alone.tokens)


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


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", SHIPPED)
def test_the_whole_demo_bench_by_every_method(target, monkeypatch, name, temperature):
    monkeypatch.chdir(ROOT)
    lm, sampling = target[0], Sampling(temperature=temperature)
    config = OmegaConf.to_object(composed("evaluate", f"drafter={name}").drafter)
    vanilla, drafted = (
        conversations(target, Engine(lm, drafter), BenchConfig(), 32, sampling)
        for drafter in (Vanilla(), config.build(lm))
    )
    assert drafted == vanilla and len(vanilla) == 82


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
