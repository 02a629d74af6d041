"""A step waits for the device but once: what would make the host wait is counted on a CPU."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import DRAFTERS
from engine_cases import HOT, PROMPTS
from helpers import adapter_for, chain_of, graphed, random_prompts, tiny, tree_of
from torch.utils._python_dispatch import TorchDispatchMode

from kangaroo.drafters.expected_gain import DraftedChain
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling

FILTERED = replace(HOT, top_k=5, top_p=0.9)


class Syncs(TorchDispatchMode):
    # in inference mode `_local_scalar_dense` is called `item`
    NAMES = (
        "_local_scalar_dense item nonzero is_nonzero masked_select equal unique _unique2 bincount "
        "repeat_interleave"
    ).split()

    def __enter__(self):
        self.counts: Counter[str] = Counter()
        self.patches = pytest.MonkeyPatch()
        # on a CPU tensor these read memory without an operator
        for name in ("tolist", "cpu", "numpy", "__array__"):
            self.patches.setattr(torch.Tensor, name, self._counted(name))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.patches.undo()

    def _counted(self, name):
        original = getattr(torch.Tensor, name)

        def method(tensor, *args, **kwargs):
            self.counts[name] += 1
            return original(tensor, *args, **kwargs)

        return method

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.counts[name] += 1
        if name in ("index", "index_put_", "index_put"):  # a mask as index hides a nonzero
            masks = [index is not None and index.dtype == torch.bool for index in args[1]]
            self.counts["mask index"] += sum(masks)
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def begun(lm, drafter, sampling: Sampling, prompts):
    session = Engine(lm, drafter).open(len(prompts), 60, sampling)
    for row, prompt in enumerate(prompts):
        session.admit(row, Request(prompt, 30, seed=HOT.seed + row))
    return session


def test_the_counter_of_syncs_sees_them():
    x = torch.arange(3)
    for code in (int, torch.where, lambda x: x.numpy(), lambda x: x[x > 1]):
        with Syncs() as syncs:
            code(x[1:2])
        assert syncs.total >= 1


@pytest.mark.parametrize(
    "name, threshold, rows, sampling",
    [
        ("vanilla", 0, 1, HOT),
        ("vanilla", 0, 4, FILTERED),
        ("kangaroo", 0, 4, FILTERED),
        ("kangaroo", 0.6, 4, Sampling()),
        ("kangaroo", 0.6, 1, HOT),
    ],
    ids=str,
)
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
def test_no_host_sync_in_a_step_beyond_those_the_design_names(
    eager_case, recorded, name, threshold, rows, sampling
):
    """One copy of the new tokens; for a threshold one read for each drafted token but the last."""
    steps, lm = 4, graphed(tiny()) if recorded else eager_case.lm
    drafter = Vanilla() if name == "vanilla" else chain_of(lm, adapter_for(lm), steps, threshold)
    session = begun(lm, drafter, sampling, random_prompts(3, 5, 1, 9)[:rows])
    for _ in range(5):
        with Syncs() as syncs:
            records = session.step()
        reads = min(max(record.drafted for record in records), steps - 1) if threshold else 0
        assert syncs.counts["tolist"] == syncs.total == 1 + reads, syncs.counts


@pytest.mark.parametrize(
    "recorded, rows, threshold", [(False, 1, 0), (False, 4, 0.3), (True, 4, 0.3)]
)
def test_a_drafted_tree_waits_once_for_its_size_and_for_each_level_that_may_be_the_last(
    monkeypatch, recorded, threshold, rows
):
    steps, levels, lm = 3, [], graphed(tiny()) if recorded else tiny()
    drafter = tree_of(lm, adapter_for(lm), steps, threshold, None, 3, 8)
    replay = drafter.replay

    def counted(batch, key, *args, **how):
        levels.extend([1] if key[0] == "level" else [])
        return replay(batch, key, *args, **how)

    monkeypatch.setattr(drafter, "replay", counted)
    session = begun(lm, drafter, HOT, random_prompts(3, 5, 1, 9)[:rows])
    for _ in range(5):
        levels.clear()
        with Syncs() as syncs:
            session.step()
        reads = min(len(levels), steps - 1) if threshold else 0
        assert syncs.counts["tolist"] == 1 + reads and syncs.total == 2 + reads, syncs.counts


@pytest.mark.parametrize("rows", [1, 3])
def test_a_hybrids_round_waits_once_more_for_each_drafted_token(eager_case, monkeypatch, rows):
    chains, add = [], DraftedChain.add
    spy = lambda chain, ranked: chains.append(chain) or add(chain, ranked)  # noqa: E731
    monkeypatch.setattr(DraftedChain, "add", spy)
    session = begun(eager_case.lm, DRAFTERS["hybrid-tree"](eager_case), HOT, PROMPTS[:rows])
    for _ in range(4):
        chains.clear()
        with Syncs() as syncs:
            session.step()
        drafted = max(len(chain.tokens) for chain in chains)
        assert syncs.counts["tolist"] == syncs.total == 1 + drafted


@pytest.mark.parametrize(
    "name", "prompt-lookup rest-tree suffix lookahead-tree token-recycling-tree".split()
)
def test_drafts_from_text_or_from_the_pool_wait_for_no_device(eager_case, name):
    session = begun(eager_case.lm, DRAFTERS[name](eager_case), HOT, PROMPTS)
    for _ in range(4):
        with Syncs() as syncs:
            session.step()
        # Token Recycling reads what is likeliest
        assert syncs.total == 1 + (name == "token-recycling-tree"), syncs.counts
