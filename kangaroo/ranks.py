"""The processes of a run that torchrun started, and the few things that they tell each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run; alone unless said otherwise.

    Args:
        rank: 0 is the one that writes files.
        world: how many there are.
    """

    rank: int = 0
    world: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes if it may choose: its own GPU, else the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def deal(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """Items `rank`, `rank + world`, ...: this process's share.

        All shares are of one length, since a sharded target is run by all processes at once. The
        bool is false for an item that only fills a share up and must not count.
        """
        rounds = -(-len(items) // self.world)
        mine = range(self.rank, rounds * self.world, self.world)
        return [(items[i % len(items)], i < len(items)) for i in mine]

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank: a small object that can be pickled."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def merge(self, results: list[T], count: int) -> list[T]:
        """What the shares of `count` dealt items gave, in the items' order, without fill-ups."""
        shares = self.gather(results)
        return [shares[i % self.world][i // self.world] for i in range(count)]

    def share(self, value: T) -> T:
        """Rank 0's value; what the others pass is not read."""
        if self.world == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Go on when all have come here."""
        self.gather(None)


@contextmanager
def join() -> Iterator[Ranks]:
    """Join the processes that torchrun started, each on its own GPU; without it, be alone."""
    if "WORLD_SIZE" not in os.environ:
        yield Ranks()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # gloo on the CPU and nccl on GPUs; rank 0 may write training data for days while others wait
    dist.init_process_group(timeout=timedelta(days=7))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
