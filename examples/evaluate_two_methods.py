"""Measure two methods on the same questions: python examples/evaluate_two_methods.py

On the command line: python evaluate.py drafter=kangaroo +drafter@more.prompt_lookup=prompt_lookup
"""

import argparse
from pathlib import Path

from rich.console import Console

from kangaroo.api import load_target, model_config
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.prompt_lookup import PromptLookupConfig
from kangaroo.evaluation import comparison
from kangaroo.evaluation.run import Baseline, EvaluateConfig, Evaluator, MethodSpec

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a name, a hub id or a folder")
parser.add_argument("--adapter", help="a folder or hub id; by default the model's own")
parser.add_argument("--questions", type=int, default=4, help="how many of the demo's 66")
parser.add_argument("--max-new-tokens", type=int, default=32)
parser.add_argument("--output", type=Path, default=Path("outputs/examples/two_methods"))
options = parser.parse_args()

model = model_config(options.model)
adapter = options.adapter or f"adapters/{model.name}"
lm, tokenizer = load_target(model)
drafters = (KangarooConfig(adapter=adapter), PromptLookupConfig())
methods = [
    MethodSpec(drafter.name, drafter.build(lm), {"drafter": drafter.settings()})
    for drafter in drafters
]
# Vanilla decoding and the two methods take turns on every question, and each text is compared with
# vanilla's, token for token. What was answered before is not asked again.
config = EvaluateConfig(
    output=str(options.output),
    question_end=options.questions,
    max_new_tokens=options.max_new_tokens,
    baselines=[Baseline.vanilla],
    warmup=1,
)
Evaluator(lm, tokenizer, methods, config, model_name=model.name).finish()

results = comparison.compare(options.output)  # of all in that folder
comparison.write(results, options.output)
comparison.show(results, Console())
print(f"The whole report: {options.output / 'report.md'}")
