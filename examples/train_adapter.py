"""Train an adapter and use it, in seconds on a tiny random model: python examples/train_adapter.py

For a real model use `python train.py model=NAME`, which has its recipe and says what that takes.
"""

import argparse
from pathlib import Path

import kangaroo
from kangaroo.api import load_target, model_config
from kangaroo.data import store
from kangaroo.data.making import SynthesisConfig
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.training.loop import Trainer
from kangaroo.training.recipe import AdapterRecipe, TrainerConfig
from kangaroo.utils.tracking import NoTracker

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="tiny", help="a name, a hub id or a folder")
parser.add_argument("--output", type=Path, default=Path("outputs/examples/train_adapter"))
options = parser.parse_args()

lm, tokenizer = load_target(model_config(options.model))

# The model writes its own training text: questions first, then its answers.
data = SynthesisConfig(
    path=str(options.output / "data"),
    shards=2,
    shard_size=32,
    max_question_tokens=16,
    max_answer_tokens=48,
    keep_unfinished_questions=True,
)
data.make(lm, tokenizer)
samples, about = store.load(Path(data.path))

# The adapter sits above the first two layers and learns to predict what the whole model predicts.
recipe = AdapterRecipe("attention", AdapterHeadConfig(), exit_layers=[2])
config = TrainerConfig(epochs=2, holdout=8, warmup_steps=4)
(folder,) = Trainer(lm, samples, [recipe], config, options.output, about).train(NoTracker())

model = kangaroo.load(options.model, adapter=str(folder))
print(f"{folder} is trained; with it the model writes:")
print(repr(model.generate("Hello", max_new_tokens=32)))
