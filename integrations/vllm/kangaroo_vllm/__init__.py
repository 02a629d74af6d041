"""Kangaroo's drafter (arXiv 2404.18911) inside vLLM: a `vllm.general_plugins` entry point."""

from __future__ import annotations

from typing import Any

ARCHITECTURE = "KangarooDraft"


def register() -> None:
    """Teach vLLM the architecture of an exported adapter; vLLM calls this in each of its processes.

    With a vLLM that this package was not tested with, vLLM stays as it is, and the architecture is
    one that refuses to load.
    """
    import vllm
    from vllm import ModelRegistry

    from kangaroo_vllm.checks import TESTED

    if vllm.__version__ not in TESTED:
        ModelRegistry.register_model(ARCHITECTURE, refusing(vllm.__version__))
        return
    ModelRegistry.register_model(ARCHITECTURE, "kangaroo_vllm.model:KangarooDraft")

    # the model runner makes its proposer by this name; there is no public hook for it
    from vllm.v1.worker import gpu_model_runner

    from kangaroo_vllm.proposer import KangarooProposer

    gpu_model_runner.DraftModelProposer = KangarooProposer

    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        from kangaroo_vllm import cpu_sampling

        cpu_sampling.repair()


def refusing(version: str) -> type:
    """A model that says that this package does not know that vLLM."""
    from torch import nn

    from kangaroo_vllm.checks import Unsupported, unknown_version

    class Refusing(nn.Module):
        # vLLM looks for these before it makes a model
        def __init__(self, *, vllm_config: Any, prefix: str = ""):
            raise Unsupported(unknown_version(version))

        def embed_input_ids(self, input_ids: Any) -> Any: ...

        def forward(self, input_ids: Any, positions: Any) -> Any: ...

        def compute_logits(self, hidden_states: Any) -> Any: ...

    return Refusing
