"""Training at scale: the same results and weights whatever the number of processes."""

import itertools
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from commands import ROOT
from helpers import tiny
from scale_worker import CASES, train_tiny
from torch import nn
from training_cases import KillsAt, curve

from kangaroo.training import backend
from kangaroo.training.backend import TorchBackend
from kangaroo.training.loop import CHECKPOINT, identity, resolve_sizes
from kangaroo.training.recipe import TrainerConfig, default_loss_chunk
from kangaroo.utils import memory
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranks import Ranks

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
TRAINED = [name for name in CASES if name not in ("killed", "two_again")]


def plain(settings):
    """The settings of one process in plain torch."""
    same = {k: v for k, v in settings.items() if k not in ("zero_stage", "shard_target")}
    if "accumulate" in same:
        same["accumulate"] = same["accumulate"] or 2  # null is the number of processes
    return same


def state(folder):
    """Weights and moments of a run's checkpoint, by name."""
    saved = torch.load(folder / CHECKPOINT, weights_only=True)["backend"]
    parts = ("weights", "exp_avg", "exp_avg_sq")
    return {(part, name): tensor for part in parts for name, tensor in saved[part].items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def launch(folder, *cases):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, ROOT / "tests/scale_worker.py", folder, *cases]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder, runs = tmp_path_factory.mktemp("alone"), {}

    def run(name):
        settings = plain(CASES[name])
        key = json.dumps(settings)
        if key not in runs:
            runs[key] = folder / name
            train_tiny(runs[key], settings)
        return runs[key]

    return run


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The cases in two processes; the last of them was killed."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.raises(KeyboardInterrupt):
        train_tiny(folder / "one_to_two", {}, KillsAt(5))
    result = launch(folder, *TRAINED, "killed")
    assert "SIGKILL" in result.stderr, result.stderr
    return folder


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("case", TRAINED)
def test_two_processes_train_as_one_does(case, two, alone):
    assert curve(two / case) == curve(alone(case))
    assert same(state(two / case), state(alone(case)))


@pytest.mark.slow
@needs_deepspeed
def test_a_run_killed_in_two_processes_ends_the_same_in_two_or_one(two, alone):
    """Begun with accumulate=null under DeepSpeed, ended in plain torch: it keeps its two a step."""
    assert len(curve(two / "killed")) == 5  # and the checkpoint holds four
    for name in ("two_again", "one_again"):
        shutil.copytree(two / "killed", two / name)
    result = launch(two, "two_again")
    assert result.returncode == 0, result.stderr
    train_tiny(two / "one_again", {"accumulate": None})
    for name in ("two_again", "one_again"):
        assert curve(two / name) == curve(alone("killed"))
        assert same(state(two / name), state(alone("killed")))


def adapters():
    torch.manual_seed(0)
    return [nn.Linear(4, 3), nn.Linear(3, 2)]


def test_the_sum_of_gradients_does_not_depend_on_their_order():
    scales = [1e-9, 0.3, -7.0, 1e4 / 3]
    ends = []
    for order in itertools.permutations(scales):
        trainer = TorchBackend(adapters(), TrainerConfig(accumulate=len(scales), clip=1e9), Ranks())
        for scale in order:
            for adapter in trainer.adapters:
                (adapter.weight.sin().sum() * scale / 9 + adapter.bias.sum() * scale).backward()
            trainer.collect()
        trainer.step([0.1, 0.2])
        ends.append(trainer.state()["exp_avg"])
    assert all(same(ends[0], end) for end in ends)


def test_each_share_is_as_long_as_the_others_and_merging_restores_the_order(monkeypatch):
    items = list("abcde")
    shares = [Ranks(rank, 3).scatter(items) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2]
    assert sorted(item for share in shares for item, counts in share if counts) == items
    results = [[item for item, _ in share] for share in shares]
    monkeypatch.setattr(Ranks, "all_gather", lambda self, value: results)
    assert Ranks(0, 3).gather(results[0], len(items)) == items


@pytest.mark.parametrize(
    "settings, world, package, message",
    [
        ({"shard_target": True}, 1, None, "shard_target=true.*there is one"),
        ({"zero_stage": 1}, 1, None, r"pip install .*\[deepspeed\]"),
        ({"muon": True, "zero_stage": 1}, 1, "there", "muon and trainer.zero_stage exclude"),
    ],
)
def test_options_unfit_for_processes_are_refused(settings, world, package, message, monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: package)
    with pytest.raises(ConfigError, match=message):
        backend.check(TrainerConfig(**settings), Ranks(0, world))


def test_what_is_not_given_is_what_a_run_began_with_else_what_suits(monkeypatch):
    lm, begun = tiny(), {}

    def resolved(**options):
        return resolve_sizes(TrainerConfig(**options), lm, begun, Ranks())

    assert resolved() == (1, 256)
    monkeypatch.setattr(memory, "total", lambda device: 80 << 30)
    assert resolved() == (1, 4096)
    assert resolved(accumulate=3) == (3, 4096) and resolved(loss_chunk=7) == (1, 7)
    begun |= identity(TrainerConfig(accumulate=8, loss_chunk=512), [])
    assert resolved() == (8, 512)
    assert resolved(accumulate=3) == (3, 512)  # and is refused later
    of_gib = {(80, 32_000): 2048, (24, 32_000): 512, (80, 128_256): 512, (16, 128_256): 256}
    for (gib, vocabulary), chunk in (of_gib | {(0, 9): 256}).items():
        assert default_loss_chunk(gib << 30, vocabulary) == chunk
