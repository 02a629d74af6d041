"""An evaluation on the tiny model, in this process or in one that is to be killed:

python tests/evaluation/evaluation_worker.py OUTPUT BENCH_FILE
"""

import json
import sys
from pathlib import Path

import torch

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.prompt_lookup import PromptLookup
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.run import Baseline, EvaluateConfig, Evaluator, MethodSpec
from kangaroo.models.loading import byte_tokenizer, random_model
from kangaroo.models.target import TargetModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import adapter_for

ONLY_VANILLA = [Baseline.vanilla]
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Tell me a tale.", "Shorter."]},
    {"question_id": 90, "category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]},
    {"question_id": 321, "category": "qa", "turns": ["Who wrote it?"]},
    {"question_id": 322, "category": "qa", "turns": ["When was that?"]},
    {"question_id": 481, "category": "rag", "turns": ["Here is a text. What does it say?"]},
]


def write_questions(file, questions=QUESTIONS):
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return file


def tiny_lm(**overrides):
    return TargetModel(random_model(deep_scale=0.15, **overrides))


def evaluate_several(
    output, bench_file, names, lm=None, ranks=None, log=None, drafters=None, **changes
):
    """Kangaroo, and prompt lookup where there are two names, or other drafters, on a random
    six-layer model over bytes, in float32.
    """
    lm = lm or tiny_lm()
    drafters = drafters or [Kangaroo(lm, adapter_for(lm), steps=3, threshold=0.2), PromptLookup()]
    pairs = zip(names, drafters, strict=False)
    methods = [MethodSpec(name, drafter, {"drafter": {"of": name}}) for name, drafter in pairs]
    settings = {"output": str(output), "max_new_tokens": 16, "warmup": 1} | changes
    config = EvaluateConfig(bench=BenchConfig("tiny", path=str(bench_file)), **settings)
    about = {"model_name": "tiny", "ranks": ranks}
    return Evaluator(lm, byte_tokenizer(), methods, config, **about).finish(log)


def evaluate_tiny(output, bench_file, lm=None, ranks=None, **changes):
    """Kangaroo alone."""
    (summary,) = evaluate_several(output, bench_file, ["kangaroo"], lm, ranks, **changes)
    return summary


if __name__ == "__main__":
    torch.set_num_threads(1)
    evaluate_tiny(sys.argv[1], sys.argv[2])
