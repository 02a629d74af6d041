"""Write questions on long texts, the pages of this project, cut to lengths that a model's context
allows (docs/results/long_texts.md):

python examples/long_prompts.py --output outputs/long.jsonl --lengths 1000 2000 4000 7800
"""

import argparse
import json
from pathlib import Path

from kangaroo.models.loading import load, model_config

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="whose tokens are counted")
parser.add_argument("--output", type=Path, default=Path("outputs/long.jsonl"))
parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 7800])
parser.add_argument("--each", type=int, default=2, help="questions of a length")
options = parser.parse_args()

root = Path(__file__).parent.parent
pages = [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]
_, tokenizer = load(model_config(options.model))
ids = tokenizer("\n\n".join(page.read_text("utf-8") for page in pages)).input_ids
ASKED = "\n\nSummarize the last of these sections in a few sentences, and quote its first one."
questions = []
for length in options.lengths:
    for index in range(options.each):
        start = index * len(ids) // options.each
        text = tokenizer.decode((ids[start:] + ids)[: length - 60])
        questions.append({"category": str(length), "turns": [text + ASKED]})
lines = [json.dumps({"question_id": i} | question) for i, question in enumerate(questions)]
options.output.parent.mkdir(parents=True, exist_ok=True)
options.output.write_text("\n".join(lines) + "\n", "utf-8")
print(f"{len(questions)} questions of {', '.join(map(str, options.lengths))} tokens")
