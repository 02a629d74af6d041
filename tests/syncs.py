"""Counts what would make the host wait for a GPU, on a CPU."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Syncs(TorchDispatchMode):
    # in inference mode `_local_scalar_dense` is called `item`
    NAMES = (
        "_local_scalar_dense item nonzero is_nonzero masked_select equal unique _unique2 bincount "
        "repeat_interleave"
    ).split()

    def __enter__(self):
        self.seen: Counter[str] = Counter()
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
            self.seen[name] += 1
            return original(tensor, *args, **kwargs)

        return method

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.seen[name] += 1
        if name in ("index", "index_put_", "index_put"):  # a mask as index hides a nonzero
            indices = args[1]
            self.seen["mask index"] += sum(
                index is not None and index.dtype == torch.bool for index in indices
            )
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.seen.values())
