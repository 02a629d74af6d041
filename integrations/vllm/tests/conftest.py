"""One vLLM at a time in this process, on a tiny random model in float32."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

# read when vLLM is imported
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import pytest
import torch
from folders import adapter_for, save_adapter, save_model, tiny
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from kangaroo.models.target import TargetModel

Serve = Callable[..., AbstractContextManager[LLM]]


@pytest.fixture(scope="session")
def lm() -> TargetModel:
    return tiny()


@pytest.fixture(scope="session")
def folders(lm: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target and what may draft for it, by name."""
    root = tmp_path_factory.mktemp("folders")
    frequent_K = torch.arange(0, 128, 2)
    attention, layer = adapter_for(lm), adapter_for(lm, feed_forward=True)
    own = adapter_for(lm, own_head=True)
    return {
        "target": save_model(lm.hf, root / "target"),
        "attention": save_adapter(lm, attention, root / "attention"),
        "layer": save_adapter(lm, layer, root / "layer"),
        "own_head": save_adapter(lm, own, root / "own_head"),
        "half": save_adapter(lm, attention, root / "half", frequent_K),
    }


@pytest.fixture(scope="session")
def serve(folders: dict[str, Path]) -> Serve:
    """`with serve("attention", steps=3) as llm:`, or without a name vLLM alone."""

    @contextmanager
    def served(
        drafter: str | None = None,
        steps: int = 3,
        threshold: float | None = 0.0,
        speculative: dict[str, Any] | None = None,
        target: str = "target",
        max_batch: int | None = None,
        text_vocabulary: int | None = None,
        **options: Any,
    ) -> Iterator[LLM]:
        if drafter is not None:
            options["speculative_config"] = {
                "method": "custom_class",
                "model": "kangaroo_vllm.Kangaroo",
                "num_speculative_tokens": steps,
            } | (speculative or {})
            ours = {
                "kangaroo": str(folders[drafter]),
                "kangaroo_threshold": threshold,
                "kangaroo_max_batch": max_batch,
                "kangaroo_text_vocabulary": text_vocabulary,
            }
            options["additional_config"] = {k: x for k, x in ours.items() if x is not None}
        defaults = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True}
        llm = LLM(
            str(folders[target]),
            skip_tokenizer_init=True,
            disable_log_stats=False,
            **(defaults | options),
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()

    return served


def prompts(count: int = 6) -> list[list[int]]:
    """Token ids, of unlike lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 128, (5 + 7 * i,), generator=generator).tolist() for i in range(count)]


def written(llm: LLM, ids: list[list[int]], **sampling: Any) -> list[list[int]]:
    """What it writes after each, all asked for at the same time."""
    defaults = {"temperature": 0.0, "max_tokens": 48, "detokenize": False}
    asked = SamplingParams(**(defaults | sampling))
    done = llm.generate([{"prompt_token_ids": x} for x in ids], asked, use_tqdm=False)
    return [list(x.outputs[0].token_ids) for x in done]


def counted(llm: LLM) -> dict[str, int]:
    """Its counts so far, by the last part of their names: drafts, draft_tokens, accepted_tokens."""
    start = "vllm:spec_decode_num_"
    found = {x.name.removeprefix(start): x for x in llm.get_metrics() if x.name.startswith(start)}
    return {name: x.value for name, x in found.items() if hasattr(x, "value")}


@pytest.fixture(scope="session")
def alone(serve: Serve) -> list[list[int]]:
    """What vLLM writes without a drafter, one prompt at a time."""
    with serve(threshold=None) as llm:
        return [written(llm, [prompt])[0] for prompt in prompts()]
