"""The processes of a run under torchrun, and their communication."""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kangaroo.utils.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's rank, and the number of processes; by default there is only one."""

    rank: int = 0
    world: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def scatter(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This process's share: items `rank`, `rank + world`, ... All shares have equal lengths,
        since a sharded target runs in all processes at once; the bool is false for padding."""
        padded = -(-len(items) // self.world) * self.world
        indices = range(self.rank, padded, self.world)
        return [(items[i % len(items)], i < len(items)) for i in indices]

    def all_gather(self, value: T) -> list[T]:
        """The values of all processes by rank; they are small objects that can be pickled."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def gather(self, results: list[T], count: int) -> list[T]:
        """The results of the `count` items that `scatter` distributed, in their order."""
        shares = self.all_gather(results)
        return [shares[i % self.world][i // self.world] for i in range(count)]

    def broadcast(self, value: T) -> T:
        """The first process's value, returned in all processes."""
        values: list[Any] = [value]
        if self.world > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def overwrite(self, value: Tensor) -> None:
        """Overwrite the tensor in every process with the first process's."""
        if self.world > 1:
            dist.broadcast(value, src=0)

    def wait(self) -> None:
        """Wait until all processes have called this."""
        self.all_gather(None)


ALONE = Ranks()


@contextmanager
def join() -> Iterator[Ranks]:
    """Join the processes that torchrun started, each on its own GPU, before a model is loaded. Only
    the first process logs, and all wait for each other at the end."""
    if "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo on CPUs and nccl on GPUs; one process may write data for days while the others wait
    dist.init_process_group(timeout=timedelta(days=7))
    try:
        ranks = Ranks(dist.get_rank(), dist.get_world_size())
        if not ranks.is_first:
            logging.disable(logging.INFO)
        yield ranks
        ranks.wait()
    finally:
        dist.destroy_process_group()


def default_device() -> torch.device:
    """The default device of this process: its own GPU, or the CPU."""
    has_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def check_alone() -> None:
    """Errors: `ConfigError` where torchrun started several processes of a one-process command."""
    if (world := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError(
            f"{Path(sys.argv[0]).name} runs in one process, and torchrun started {world}, which "
            "would overwrite each other's files. Start it without torchrun."
        )
