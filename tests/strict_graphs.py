"""Graphs on the CPU, as strict as CUDA's.

A CUDA graph is a list of kernels with bare addresses. So is a `Tape`, of operators and of Triton's
kernels. It keeps alive only what the work allocated itself, as a graph's pool does; a replay runs
on the very same addresses, and fails where memory of others has died or moved. Recording computes
nothing. After a replay all that the work allocated is rubbish, since graphs share one pool. A pool
whose last tape was freed cannot be recorded into again, nor can work that waits for the device.
"""

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from kangaroo.cuda import launching
from kangaroo.cuda.graphs import MOST_GRAPHS, WARM_UPS, Graphs
from kangaroo.engine.cache import tensors_in, with_tensors

start = launching.start

# What CUDA refuses while it records, since the host would have to wait or its memory be read;
# in inference mode `_local_scalar_dense` is called `item`.
REFUSED = (
    "_local_scalar_dense item is_nonzero nonzero masked_select equal _unique2 lift_fresh".split()
)
# On a CPU these read or share memory without an operator.
UNSEEN = (Tensor, "tolist"), (Tensor, "numpy"), (Tensor, "__array__"), (Tensor, "cpu")
UNSEEN += ((torch, "from_numpy"),)


class CaptureError(RuntimeError):
    """Work did what cannot be recorded."""


class DanglingGraph(RuntimeError):
    """A graph was replayed whose memory is no longer there."""


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # with the tensors that recording saw; no results where one writes into its arguments
        self.operators: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        # memory that the work did not allocate, by its address, and not kept alive
        self.foreign: dict[int, StorageWeakRef] = {}
        self.pool: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = tensors_in([args, *kwargs.values()])
        by_mask = name == "aten::index" and any(x.dtype == torch.bool for x in tensors[1:])
        if name.removeprefix("aten::") in REFUSED or by_mask:
            raise CaptureError(f"{name} waits for the device or reads from the host")
        for x in tensors:
            self._note(x)
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            self._append(func, args, kwargs, [])
            if all(_address(x) in self.pool for x in written):
                return func(*args, **kwargs)
            assert len(written) == 1, name
            return written[0]  # the memory of others stays as it is
        out = func(*args, **kwargs)
        results = tensors_in(out)
        new = [x for x in results if not (_address(x) in self.pool or _address(x) in self.foreign)]
        if new or not results:
            assert len(new) == len(results), f"{name} gives views and new tensors at once"
            for x in new:
                self.pool[_address(x)] = x.untyped_storage()
            self._append(func, args, kwargs, new)
        return out

    def launch(self, kernel: Any, grid: Any, args: Any, options: Any) -> None:
        """Stands in for `launching.start`, on copies of what the work does not own."""
        with _disable_current_modes():
            for x in args:
                if isinstance(x, Tensor):
                    self._note(x)
            copy = mapped(lambda x: x if _address(x) in self.pool else twin(x), args)
            start(kernel, grid, copy, options)
            self._append(lambda *args: start(kernel, grid, args, options), args, {}, [])

    @torch.no_grad()
    def replay(self) -> None:
        for address, foreign in self.foreign.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(foreign.cdata)
            if storage is None or storage.data_ptr() != address:
                fate = "was freed" if storage is None else "has moved"
                raise DanglingGraph(f"memory that recording saw {fate}")
        for run, args, kwargs, results in self.operators:
            out = run(*args, **kwargs)
            for mine, x in zip(results, tensors_in(out) if results else (), strict=True):
                mine.copy_(x)
        self.spoil()

    def _note(self, x: Tensor) -> None:
        address = _address(x)
        if address not in self.pool and address not in self.foreign and address:
            self.foreign[address] = StorageWeakRef(x.untyped_storage())

    def _append(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        bare = {name: mapped(bare_tensor, x) for name, x in kwargs.items()}
        own = [bare_tensor(x) for x in results]
        self.operators.append((func, mapped(bare_tensor, args), bare, own))

    def spoil(self) -> None:
        """Fill the pool with what is no number and no index."""
        for address, storage in self.pool.items():
            if storage.nbytes():
                ctypes.memset(address, 0xFF, storage.nbytes())


@contextmanager
def refusing_unseen() -> Iterator[None]:
    """Refuse what a tape does not see, but for Triton's interpreter, which runs without modes."""

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _get_current_dispatch_mode() is not None:
                raise CaptureError(f"{name} waits for the device or reads from the host")
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in UNSEEN:
            call = refusing(name, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, call))
        yield


def mapped(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    return with_tensors(x, map(change, tensors_in(x)))


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operator writes into, by its schema."""
    arguments = func._schema.arguments
    named = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return [named[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def bare_tensor(x: Tensor) -> Tensor:
    """The same numbers by their address alone: nobody's memory is kept alive by it."""
    size = x.untyped_storage().nbytes()
    if not size:
        return torch.empty(x.shape, dtype=x.dtype)
    memory = (ctypes.c_char * size).from_address(_address(x))
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(x.dtype)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def twin(x: Tensor) -> Tensor:
    """The same numbers in memory of their own, in the same places of it."""
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())


class StrictRecorder:
    """Stands in for `kangaroo.cuda.graphs.GraphRecorder`."""

    def __init__(self) -> None:
        self.tapes = weakref.WeakSet[Tape]()
        self.begun = False

    def __call__(self, work: Callable[[], object]) -> Callable[[], None]:
        for _ in range(WARM_UPS):
            work()
        if self.begun and not self.tapes:
            raise CaptureError("use_count > 0 INTERNAL ASSERT FAILED: this pool's graphs are gone")
        tape, self.begun = Tape(), True
        self.tapes.add(tape)
        with tape, patch.object(launching, "start", tape.launch), refusing_unseen():
            work()
        tape.spoil()
        return tape.replay


class StrictGraphs(Graphs):
    """Graphs for models on the CPU."""

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        super().__init__(torch.device("cpu"), StrictRecorder(), most)
