"""CUDA graphs: work on tensors of unchanging shape, recorded once and replayed.

A step of decoding launches hundreds of small kernels, which takes the host longer than they take
the GPU. A graph holds bare addresses: whoever records says whose memory the work uses besides its
inputs, and a graph never outlives that.
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

from kangaroo.engine.cache import KVCache, Tensors, tensors_in, with_tensors

WARM_UPS = 2  # libraries allocate and choose kernels in their first calls, which no graph may hold
MOST_TOKENS = 512  # a pass over more keeps the GPU busy for longer than its launch takes
MOST_GRAPHS = 1024  # of one model; the one used longest ago gives way

Key = tuple[Any, ...]
Record = Callable[[Callable[[], None]], Callable[[], Any]]  # gives what repeats the work


@dataclass
class Recorded:
    """One graph.

    Args:
        inputs, results: what it reads, where a call copies its own, and what a replay writes. They
            are not in the graphs' pool, where a replay overwrites what later graphs have left.
    """

    inputs: list[Tensor]
    replay: Callable[[], Any]
    results: Any


class Graphs:
    """Recorded work, by caches and key, on one device.

    Besides its inputs, work may use the weights of the model and of a drafter that owns one of the
    caches. Work that is recorded may call these graphs again: that becomes part of it.
    """

    seconds = 0.0  # spent on recording by all models, which is no part of decoding

    def __init__(self, device: torch.device, record: Record | None = None, most: int = MOST_GRAPHS):
        self.device, self.most = device, most
        self.record = record or GraphRecorder(device)
        self.made: OrderedDict[Key, Recorded] = OrderedDict()
        self.watched: set[int] = set()  # serials of caches whose end will be told
        self.dead: list[int] = []  # serials of caches that ended while something was recorded
        self.static = WeakIdKeyDictionary()  # tensors that are rewritten in place, call after call
        self.recording = False
        # CUDA gives a pool up with the last graph in it, and refuses to record there again. Caches
        # come and go with all their graphs; this empty one stays.
        self.keeps_pool = self.record(lambda: None)

    def take(self, tokens: int) -> bool:
        """Whether work on so many tokens is recorded; more are a prefill or training."""
        return not self.recording and tokens <= MOST_TOKENS and not torch.is_grad_enabled()

    def __call__(
        self,
        caches: Sequence[KVCache],
        key: Key,
        work: Callable[..., Any] | None,
        *inputs: Any,
        rehearsal: Tensors | None = None,
    ) -> Any:
        """The results of `work(*inputs)`, which must do the same for every call of this key.
        Inputs and results are tensors, or hold some (`tensors_in`); all else in them stays what it
        was when this was recorded.

        The next call with this key overwrites the results.

        Args:
            caches: all that the work reads or writes; when one of them ends, the graph does.
            key: names the work and everything about it that is not in a tensor.
            work: None gives the inputs themselves, in the same place call after call: work that
                takes them as inputs need not copy them.
            rehearsal: inputs to run with before recording; needed where a second run with the same
                inputs would not leave everything as the first did.
        """
        if self.recording:
            return inputs if work is None else work(*inputs)
        while self.dead:
            self._forget(self.dead.pop())
        given, serials = tensors_in(inputs), tuple(cache.serial for cache in caches)
        whole = (serials, *key, *(x.shape for x in given))
        with torch.inference_mode():  # wherever the call comes from, the tensors are of one kind
            if whole not in self.made:
                self._watch(caches)
                self._make(whole, work, rehearsal or inputs)
            self.made.move_to_end(whole)
            graph = self.made[whole]
            pairs = zip(graph.inputs, given, strict=True)
            stale = [pair for pair in pairs if pair[0] is not pair[1]]
            for dtype in {x.dtype for _, x in stale}:  # of each all at once
                same = [pair for pair in stale if pair[1].dtype == dtype]
                torch._foreach_copy_([place for place, _ in same], [x for _, x in same])
            graph.replay()
        return graph.results

    def _make(self, whole: Key, work: Callable[..., Any] | None, inputs: tuple[Any, ...]) -> None:
        self._wait()
        start = time.perf_counter()
        held = [x if x in self.static else x.clone() for x in tensors_in(inputs)]
        graph = Recorded(held, lambda: None, with_tensors(inputs, iter(held)))
        if work is not None:

            def run() -> Any:
                return work(*with_tensors(inputs, iter(held)))  # made anew: a tree keeps its masks

            self.recording = True
            try:
                results = run()
                places = [torch.empty_like(x) for x in tensors_in(results)]
                graph.results = with_tensors(results, iter(places))
                graph.replay = self.record(lambda: _fill(places, tensors_in(run())))
            finally:
                self.recording = False
        for tensor in tensors_in(graph.results):
            self.static[tensor] = True
        self.made[whole] = graph
        if len(self.made) > self.most:
            self.made.popitem(last=False)
        self._wait()
        Graphs.seconds += time.perf_counter() - start

    def _watch(self, caches: Sequence[KVCache]) -> None:
        for cache in caches:
            if cache.serial not in self.watched:
                self.watched.add(cache.serial)
                weakref.finalize(cache, _ended, weakref.ref(self), cache.serial).atexit = False

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forget(self, serial: int) -> None:
        self.watched.discard(serial)
        for key in [key for key in self.made if serial in key[0]]:
            del self.made[key]


def _fill(places: list[Tensor], values: list[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def _ended(graphs: weakref.ref[Graphs], serial: int) -> None:
    """A cache is gone. During a recording nothing may be freed: the next call does it."""
    alive = graphs()
    if alive is not None and alive.recording:
        alive.dead.append(serial)
    elif alive is not None:
        alive._forget(serial)


class GraphRecorder:
    """Records CUDA graphs, all in one pool of memory: none runs while another does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], Any]:
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    work()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                with torch.cuda.graph(graph, pool=self.pool):
                    work()
        return graph.replay
