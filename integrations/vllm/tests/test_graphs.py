"""The halves as CUDA graphs, on a stand-in that is stricter than a GPU.

vLLM cuts compiled code at attention, and records each piece for some numbers of tokens. Here a
recorded piece runs again on the tensors that it was recorded with, wherever they are, and what a
GPU may overwrite becomes NaN.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from conftest import counted, prompts, written
from vllm.compilation.base_static_graph import AbstractStaticGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.platforms.cpu import CpuPlatform

SIZES = [1, 2, 4, 8, 16]  # of graphs, in tokens
Place = tuple[int, int]  # a compiled module, and a graph's size


class Recorded(AbstractStaticGraphWrapper):
    """A piece of compiled code."""

    records: ClassVar[bool] = False
    modules: ClassVar[int] = 0  # that were compiled so far
    ends: ClassVar[dict[Place, list[torch.Tensor]]] = {}  # what modules return
    replays: ClassVar[set[Place]] = set()

    def __init__(self, runnable: Any, vllm_config: Any, runtime_mode: Any, cudagraph_options: Any):
        self.runnable, self.mode = runnable, runtime_mode
        self.is_first = cudagraph_options.debug_log_enable
        self.is_last = cudagraph_options.weak_ref_output
        Recorded.modules += self.is_first
        self.module = Recorded.modules
        self.recordings: dict[Any, tuple[Any, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runnable, name)

    def __call__(self, *args: Any) -> Any:
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.mode:
            return self.runnable(*args)
        graph = context.batch_descriptor
        place = self.module, graph.num_tokens
        if graph not in self.recordings:
            assert self.records, f"there is no graph of {graph}"
            output = self.runnable(*args)
            self.recordings[graph] = args, output
            if self.is_last:
                Recorded.ends[place] = tensors(output)
        else:
            inputs, output = self.recordings[graph]
            for given, expected in zip(tensors(args), tensors(inputs), strict=True):
                assert given.data_ptr() == expected.data_ptr() and given.shape == expected.shape
            if self.is_first:
                self.overwrite(*place)
            for kept, result in zip(tensors(output), tensors(self.runnable(*inputs)), strict=True):
                kept.copy_(result)
            Recorded.replays.add(place)
        return output

    @staticmethod
    def overwrite(module: int, size: int) -> None:
        """Graphs share their memory, but for the states that later modules read of a pass."""
        first = min(module for module, _ in Recorded.ends)
        for (other, other_size), output in Recorded.ends.items():
            if module == first or other != first or other_size != size:
                for state in output:
                    state.fill_(torch.nan)


def tensors(values: Any) -> list[torch.Tensor]:
    values = values if isinstance(values, list | tuple) else [values]
    return [x for x in values if isinstance(x, torch.Tensor)]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Records the graphs of a served model, whose config has them."""
    check = CpuPlatform.check_and_update_config.__func__

    def with_graphs(cls: Any, vllm_config: Any) -> None:
        check(cls, vllm_config)
        compilation = vllm_config.compilation_config
        compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "eager"
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        compilation.cudagraph_capture_sizes, compilation.compile_sizes = SIZES, []
        compilation.max_cudagraph_capture_size = SIZES[-1]

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(with_graphs))
    wrapper = classmethod(lambda cls: f"{__name__}.Recorded")
    monkeypatch.setattr(CpuPlatform, "get_static_graph_wrapper_cls", wrapper)

    @torch.inference_mode()
    def recorded(llm: Any) -> None:
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        Recorded.records = True
        for mode, graphs in runner.cudagraph_dispatcher.get_capture_descs():
            for graph in graphs:
                runner._dummy_run(graph.num_tokens, cudagraph_runtime_mode=mode)
        Recorded.records = False
        for place in Recorded.ends:
            Recorded.overwrite(*place)

    yield recorded
    Recorded.ends.clear()
    Recorded.replays.clear()


def test_recorded_halves_write_the_same(serve, alone, record):
    with serve("half", enforce_eager=False) as llm:
        record(llm)
        assert written(llm, prompts()) == alone
        assert counted(llm)["accepted_tokens"] > 0
    sizes = Counter(module for module, _ in Recorded.replays)
    assert len(sizes) == 3 and min(sizes.values()) > 1  # below, adapter and above
