"""An evaluation on the tiny model, in this process or in one that is to be killed:

python tests/evaluation_worker.py OUTPUT BENCH_FILE
"""

import sys
from pathlib import Path

import torch

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.run import Contestant, EvaluateConfig, evaluate
from kangaroo.models.loading import byte_tokenizer, random_model
from kangaroo.models.target import LM
from kangaroo.utils.ranks import join

sys.path.insert(0, str(Path(__file__).parent))
from helpers import adapter_for


def tiny_lm(**overrides):
    return LM(random_model(deep_scale=0.15, **overrides))


def evaluate_tiny(output, bench_file, lm=None, drafter=None, ranks=None, **changes):
    """Kangaroo on a random six-layer model over bytes, in float32."""
    lm = lm or tiny_lm()
    settings = {"output": str(output), "max_new_tokens": 16, "warmup": 1} | changes
    drafter = drafter or Kangaroo(lm, adapter_for(lm), steps=3, threshold=0.2)
    (summary,) = evaluate(
        lm,
        byte_tokenizer(),
        [Contestant("kangaroo", drafter, {"drafter": {"steps": 3}})],
        EvaluateConfig(bench=BenchConfig("tiny", path=str(bench_file)), **settings),
        model_name="tiny",
        ranks=ranks,
    )
    return summary


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join() as own:
        evaluate_tiny(sys.argv[1], sys.argv[2], ranks=own)
