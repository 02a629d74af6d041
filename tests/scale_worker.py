"""Training runs on the tiny model, in this process or in each of those that torchrun starts:

torchrun --nproc-per-node=2 tests/scale_worker.py FOLDER CASE...
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent))
from helpers import recipe_of, tiny
from training_cases import KillsAt, config, samples, train

from kangaroo.models.target import TargetModel
from kangaroo.utils.ranks import ALONE, join

# Settings that differ from those of all cases.
CASES: dict[str, dict[str, Any]] = {
    "torch": {},
    "torch_idle": {"accumulate": 1},  # the second process has nothing to do
    "torch_sharded": {"shard_target": True},
    "muon": {"muon": True},
    "stage1": {"zero_stage": 1},
    "stage2": {"zero_stage": 2, "accumulate": 3},
    "sharded": {"zero_stage": 1, "shard_target": True},
    "one_to_two": {"zero_stage": 1},
    "killed": {"zero_stage": 2, "accumulate": None},  # rank 0, at step 5
    "two_again": {"accumulate": None},
}


class KillsProcessAt(KillsAt):
    """Without a chance to clean up."""

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)


def train_tiny(output, settings, tracker=None, ranks=ALONE, lm=None, recipes=None):
    """Three adapters on a random four-layer model, in 18, 9 or 6 steps (accumulate=1, 2, 3)."""
    shared = {"epochs": 3, "accumulate": 2, "holdout": 3, "clip": 0.05}
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
            settings, lm = CASES[name], tiny()
            is_sharded = bool(settings.get("shard_target"))
            if is_sharded and not ranks.is_first:  # as `target_with_data` loads it
                lm = TargetModel(lm.hf.to("meta"))
            killer = KillsProcessAt(5) if name == "killed" else None
            train_tiny(Path(sys.argv[1]) / name, settings, killer, ranks, lm)
            weights = list(lm.layers.parameters())
            held = sum((w.to_local() if isinstance(w, DTensor) else w).numel() for w in weights)
            share = 0.5 if is_sharded else 1
            assert held == share * sum(w.numel() for w in weights)
