"""Counts what would make the host wait for a GPU, on a CPU."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Syncs(TorchDispatchMode):
    """Counts what would make the host wait for a GPU."""

    NAMES = (
        "_local_scalar_dense",
        "item",  # what that is called in inference mode
        "nonzero",
        "is_nonzero",
        "masked_select",
        "equal",
        "unique",
        "_unique2",
        "bincount",
        "repeat_interleave",
    )

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen: Counter[str] = Counter()
        # on a CPU tensor these read memory without an operator
        for name in ("tolist", "cpu", "numpy", "__array__"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(name))

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
