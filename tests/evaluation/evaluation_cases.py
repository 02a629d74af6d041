"""Records and results of an evaluation, written by hand or by a tiny model."""

import io
import json

from helpers import adapter_for, chain_of
from rich.console import Console

from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.evaluation import comparison, summary
from kangaroo.evaluation.bench import MTBENCH, BenchConfig
from kangaroo.evaluation.records import METHOD, MethodRun, Record, Turn, append
from kangaroo.evaluation.run import EvaluateConfig, Evaluator, MethodSpec
from kangaroo.models.loading import byte_tokenizer, random_model
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranks import ALONE

SETTINGS = {"model": "m", "drafter": "d", "bench": "b", "dtype": "float32", "device": "cpu"}
SETTINGS |= {"max_new_tokens": 8, "sampling.temperature": 0.0, "sampling.rule": "match"}
SETTINGS["baselines"] = ["vanilla"]
COST = {"parameters": 10, "training": {"trained_positions": 1200, "epochs": 2}}
PROVENANCE = {"command": "evaluate.py", "git_revision": "abc", "time": "now"}
PROVENANCE |= {"versions": {"torch": "2"}, "hardware": {"cpu": "x", "threads": 1, "cuda": None}}
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Tell me a tale.", "Shorter."]},
    {"question_id": 90, "category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]},
    {"question_id": 321, "category": "qa", "turns": ["Who wrote it?"]},
    {"question_id": 322, "category": "qa", "turns": ["When was that?"]},
    {"question_id": 481, "category": "rag", "turns": ["Here is a text. What does it say?"]},
]


def run(emitted, accepted, drafted, seconds, prefill=1.0, tokens=None, retokenised=None):
    """A text; all of a round's `seconds` but a fifth is drafting and verifying, half each."""
    tokens = list(range(sum(emitted))) if tokens is None else tokens
    retokenised = sum(emitted) + 1 if retokenised is None else retokenised
    rounds = emitted, accepted, drafted, *([part * s for s in seconds] for part in (0.4, 0.4, 0.2))
    return MethodRun(tokens, "text", "length", retokenised, prefill + sum(seconds), *rounds)


def vanilla_run(count, seconds=1.0, **others):
    return run([1] * count, [0] * count, [0] * count, [seconds] * count, **others)


def hf_run(count, seconds):
    """An answer of transformers, whose tokens take equally long."""
    return run([count], [0], [0], [seconds], prefill=0.0)


def record(question_id, *pairs, category="qa", fork=None, prompts=(3, 3)):
    """A question of pairs (method's run, vanilla's or None); `prompts` are the prompts' lengths."""
    turns = [
        Turn(length, 8, {METHOD: a} if b is None else {METHOD: a, "vanilla": b}, fork)
        for length, (a, b) in zip(prompts, pairs, strict=False)
    ]
    task = "mt_bench" if category in MTBENCH else category
    return Record(question_id, category, turns, finished=0.0, task=task)


def summarised(records, cost=COST, **settings):
    about = {"settings": SETTINGS | settings, "drafter_cost": cost, "provenance": PROVENANCE}
    return summary.summarise(records, about)


def finish(folder, records, cost=COST, **settings):
    """A finished run, called as its folder where nothing else is said."""
    folder.mkdir(parents=True)
    for each in records:
        append(each, folder)
    result = summarised(records, cost, **{"drafter": folder.name} | settings)
    (folder / "summary.json").write_text(json.dumps(result))


def shown(compared):
    """A comparison as a terminal of 80 columns shows it."""
    text = io.StringIO()
    comparison.show(compared, Console(width=80, file=text))
    assert max(map(len, text.getvalue().partition(":")[0].splitlines())) <= 80
    return " ".join(text.getvalue().split())


def write_questions(file, questions=QUESTIONS):
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return file


def tiny_lm(**overrides):
    return TargetModel(random_model(deep_scale=0.15, **overrides))


def evaluate_several(output, bench, names, lm=None, ranks=ALONE, log=None, drafters=None, **fields):
    """Kangaroo, and prompt lookup where there are two names, or other drafters, on a random
    six-layer model over bytes, in float32."""
    lm = lm or tiny_lm().compile_for_decoding()
    drafters = drafters or [chain_of(lm, adapter_for(lm), steps=3, threshold=0.2), PromptLookup()]
    pairs = zip(names, drafters, strict=False)
    methods = [MethodSpec(name, drafter, {"drafter": {"of": name}}) for name, drafter in pairs]
    settings = {"output": str(output), "max_new_tokens": 16, "warmup": 1} | fields
    config = EvaluateConfig(bench=BenchConfig("tiny", path=str(bench)), **settings)
    about = {"model_name": "tiny", "ranks": ranks}
    return Evaluator(lm, byte_tokenizer(), methods, config, **about).finish(log)


def evaluate_tiny(output, bench, lm=None, ranks=ALONE, **changes):
    (summary,) = evaluate_several(output, bench, ["kangaroo"], lm, ranks, **changes)
    return summary
