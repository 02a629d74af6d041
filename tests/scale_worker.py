"""Training runs on the tiny model, in this process or in each of those that torchrun starts:

torchrun --nproc-per-node=2 tests/scale_worker.py FOLDER CASE...
"""

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
from helpers import recipe_of, tiny
from training_cases import KillsAt, config, samples, train

from kangaroo.utils.ranks import ALONE, join


@dataclass
class Case:
    """Settings that differ from those of all cases, and the step at which rank 0 is killed."""

    settings: dict[str, Any] = field(default_factory=dict)
    killed_at: int | None = None


CASES = {
    "torch": Case(),
    "torch_idle": Case({"accumulate": 1}),  # the second process has nothing to do
    "torch_sharded": Case({"shard_target": True}),
    "muon": Case({"muon": True}),
    "stage1": Case({"zero_stage": 1}),
    "stage2": Case({"zero_stage": 2, "accumulate": 3}),
    "sharded": Case({"zero_stage": 1, "shard_target": True}),
    "one_to_two": Case({"zero_stage": 1}),
    "killed": Case({"zero_stage": 2, "accumulate": None}, killed_at=5),
    "two_again": Case({"accumulate": None}),
}


class KillsProcessAt(KillsAt):
    """Without a chance to clean up."""

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)


def train_tiny(output, settings, tracker=None, ranks=ALONE, lm=None, recipes=None):
    """Three adapters on a random four-layer model, in 18, 9 or 6 steps (accumulate=1, 2, 3)."""
    shared = {"epochs": 3, "accumulate": 2, "holdout": 3, "clip": 0.05, "decode_every": 4}
    shared |= {"decode_prompts": 2, "decode_tokens": 8}
    recipes = recipes or [
        recipe_of(name="attention", exit_layers=[1, 2]),
        recipe_of(name="fused", fused=True, draft_steps=2, learning_rate=0.003),
    ]
    options = config(**(shared | settings))
    train(lm or tiny(), samples(15), options, output, tracker, recipes=recipes, ranks=ranks)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join() as ranks:
        for name in sys.argv[2:]:
            case = CASES[name]
            killer = None if case.killed_at is None else KillsProcessAt(case.killed_at)
            lm = tiny()
            train_tiny(Path(sys.argv[1]) / name, case.settings, killer, ranks, lm)
            weights = list(lm.layers.parameters())
            held = sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights)
            share = 0.5 if case.settings.get("shard_target") else 1
            assert held == share * sum(w.numel() for w in weights)
