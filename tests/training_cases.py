"""Texts, settings and runs for the tests of training."""

import torch
from helpers import EXIT, VOCABULARY, forward_logits, random_prompts, recipe_of

from kangaroo.engine import topk_logits
from kangaroo.training.loop import Trainer
from kangaroo.training.recipe import TrainerConfig
from kangaroo.training.results import read_metrics
from kangaroo.utils.ranks import ALONE
from kangaroo.utils.tracking import NoTracker

ABOUT = {"fingerprint": "test"}


def sample(ids, prompt_length):
    mask = [0] * prompt_length + [1] * (len(ids) - prompt_length)
    return {"messages": [{"role": "user", "content": "Why?"}], "input_ids": ids, "loss_mask": mask}


def samples(count):
    return [sample(ids, 5) for ids in random_prompts(*range(20, 20 + count))]


def stored_samples(lm, count=VOCABULARY, samples=12):
    """Samples with `count` likeliest tokens of what the target would have stored of each."""
    with_records = []
    for ids in random_prompts(*range(20, 20 + samples)):
        plain = sample(ids, 5)
        at = [i - 1 for i, is_learnt in enumerate(plain["loss_mask"]) if is_learnt]
        (records,) = topk_logits.likeliest(forward_logits(lm, ids)[None], torch.tensor([at]), count)
        with_records.append(plain | {"teacher": topk_logits.rounded(records)})
    return with_records


def config(**changes):
    settings = {"epochs": 2, "batch_tokens": 64, "holdout": 2, "loss_chunk": 7, "warmup_steps": 2}
    settings |= {"evaluate_every": 3, "save_every": 2}
    return TrainerConfig(**(settings | changes))


def recipe(**changes):
    return recipe_of(**({"exit_layers": [EXIT]} | changes))


def train(lm, data, settings, folder, tracker=None, about=ABOUT, recipes=None, ranks=ALONE):
    trainer = Trainer(lm, data, recipes or [recipe()], settings, folder, about, ranks)
    return trainer.train(tracker or NoTracker())


def run(lm, folder, adapter=None, data=None, **changes):
    """The folder of an adapter that is trained."""
    recipes, data = [adapter or recipe()], data or samples(8)
    (saved,) = train(lm, data, config(**changes), folder, recipes=recipes)
    return saved


def curve(folder):
    """The metrics of every step, but for what is of the process alone."""
    of_process = ("tokens_per_second", "peak_memory_gib")
    return [{k: v for k, v in row.items() if k not in of_process} for row in read_metrics(folder)]


class KillsAt(NoTracker):
    """Stops the run in the middle, after a step that no checkpoint holds: `KeyboardInterrupt`."""

    def __init__(self, step):
        self.step = step

    def log(self, metrics, step):
        if step == self.step:
            self.kill()

    def kill(self):
        raise KeyboardInterrupt
