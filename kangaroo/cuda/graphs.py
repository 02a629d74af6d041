"""CUDA graphs: work on tensors of fixed shapes, recorded once and replayed.

A step of decoding is hundreds of small kernels, and launching them takes longer than running them.
A graph holds bare addresses, so callers name the caches that the work uses, and a graph is deleted
with them.
"""

import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from kangaroo.engine.backend import Key
from kangaroo.engine.cache import KVCache, Tensors, tensors_in, with_tensors

WARM_UPS = 2  # libraries allocate and choose kernels in their first calls, outside of any graph
MOST_TOKENS = 512  # a pass over more takes the GPU longer than the host needs for the launches
MOST_GRAPHS = 1024  # of one model; the least recently used one is deleted

Record = Callable[[Callable[[], object]], Callable[[], Any]]  # returns a function that replays


@dataclass
class Recorded:
    """A graph that reads `inputs` and writes `results`, outside of the memory pool it shares."""

    inputs: list[Tensor]
    replay: Callable[[], Any]
    results: Any


class Graphs:
    """Recorded work, by caches and key, on one device. Besides its inputs, work may use the weights
    of the model and of a drafter that owns one of the caches."""

    seconds = 0.0  # all models' time for recording, which does not count as decoding

    def __init__(self, device: torch.device, record: Record | None = None, most: int = MOST_GRAPHS):
        self.device = device
        self.most = most
        self.record = record or GraphRecorder(device)
        self.recorded: OrderedDict[Key, Recorded] = OrderedDict()
        self.watched: set[int] = set()  # serials of live caches
        self.dead: list[int] = []  # serials of caches that were freed during a recording
        self.static = WeakIdKeyDictionary()  # tensors that calls rewrite in place
        self.recording = False
        # CUDA deletes a pool with its last graph, and cannot record there again. Caches take all
        # their graphs with them; this empty one stays.
        self.keeps_pool = self.record(lambda: None)

    def takes(self, tokens: int) -> bool:
        """Whether work on so many tokens is recorded. A prefill or training has more."""
        return not self.recording and tokens <= MOST_TOKENS and not torch.is_grad_enabled()

    def __call__(
        self,
        caches: Sequence[KVCache],
        key: Key,
        work: Callable[..., Any] | None,
        *inputs: Any,
        rehearsal: Tensors | None = None,
    ) -> Any:
        """`Backend.replay`, always recorded. The work must do the same in every call with this key:
        only tensors in inputs and results (`tensors_in`) change. The next call with this key
        overwrites the results; the graph is deleted with any of the caches. Without work the inputs
        become tensors that stay in place, so that other work with them need not copy them."""
        while self.dead:
            self._forget(self.dead.pop())
        tensors = tensors_in(inputs)
        full_key = (tuple(cache.serial for cache in caches), *key, *(x.shape for x in tensors))
        with torch.inference_mode():  # all tensors are inference tensors, whoever calls
            if full_key not in self.recorded:
                self._watch(caches)
                self._make(full_key, work, rehearsal or inputs)
            self.recorded.move_to_end(full_key)
            graph = self.recorded[full_key]
            pairs = zip(graph.inputs, tensors, strict=True)
            changed = [(to, x) for to, x in pairs if to is not x]
            for dtype in {x.dtype for _, x in changed}:  # one copy for each dtype
                copies = [(to, x) for to, x in changed if x.dtype == dtype]
                torch._foreach_copy_([to for to, _ in copies], [x for _, x in copies])
            graph.replay()
        return graph.results

    def _make(self, key: Key, work: Callable[..., Any] | None, inputs: tuple[Any, ...]) -> None:
        self._wait()
        start = time.perf_counter()
        buffers = [x if x in self.static else x.clone() for x in tensors_in(inputs)]
        graph = Recorded(buffers, lambda: None, with_tensors(inputs, iter(buffers)))
        if work is not None:

            def run() -> Any:
                return work(*with_tensors(inputs, iter(buffers)))  # new: a tree caches masks

            def run_and_copy() -> None:
                for value, output in zip(tensors_in(run()), outputs, strict=True):
                    output.copy_(value)

            self.recording = True
            try:
                results = run()
                outputs = [torch.empty_like(x) for x in tensors_in(results)]
                graph.results = with_tensors(results, iter(outputs))
                graph.replay = self.record(run_and_copy)
            finally:
                self.recording = False
        for tensor in tensors_in(graph.results):
            self.static[tensor] = True
        self.recorded[key] = graph
        if len(self.recorded) > self.most:
            self.recorded.popitem(last=False)
        self._wait()
        Graphs.seconds += time.perf_counter() - start

    def _watch(self, caches: Sequence[KVCache]) -> None:
        for cache in caches:
            if cache.serial not in self.watched:
                self.watched.add(cache.serial)
                weakref.finalize(cache, _on_freed, weakref.ref(self), cache.serial).atexit = False

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forget(self, serial: int) -> None:
        self.watched.discard(serial)
        keys = [key for key in self.recorded if serial in key[0]]
        if keys:
            self._wait()  # a step that nobody reads may still run
        for key in keys:
            del self.recorded[key]


def _on_freed(reference: weakref.ref[Graphs], serial: int) -> None:
    """Delete a freed cache's graphs; during a recording leave it to the next call."""
    graphs = reference()
    if graphs is not None and graphs.recording:
        graphs.dead.append(serial)
    elif graphs is not None:
        graphs._forget(serial)


class GraphRecorder:
    """Records CUDA graphs in one memory pool, which works since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], object]) -> Callable[[], Any]:
        # the outer stream is the current one again even where a recording fails
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream()):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    work()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                # else another thread's allocation, a server's say, ends the recording
                with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                    work()
        return graph.replay
