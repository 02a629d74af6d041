"""Which of a target's layers a draft may skip: the file that a search leaves behind."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from kangaroo.heads.adapter_files import target_hash
from kangaroo.models.loading import options_of
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, AdapterNotFound, CorruptFile
from kangaroo.utils.folders import command_line, located
from kangaroo.utils.memory import weights


@dataclass
class LayerSubset:
    """What a search found.

    Args:
        skip: layers, counted from 0.
        target, target_hash: as of an adapter's config.
        search: budget, results, provenance.
    """

    skip: list[int]
    target: str
    target_hash: str
    search: dict[str, Any] = field(default_factory=dict)


def runs(skip: Collection[int], n_layers: int) -> list[range]:
    """The layers that are left, as ranges."""
    kept = [layer for layer in range(n_layers) if layer not in set(skip)]
    # layers in a row differ from their places by the same number
    groups = groupby(enumerate(kept), key=lambda pair: pair[1] - pair[0])
    blocks = [[layer for _, layer in group] for _, group in groups]
    return [range(group[0], group[-1] + 1) for group in blocks]


def draft_cost(lm: TargetModel, skip: Collection[int]) -> float:
    """Weights that a draft token reads, as a share of a token's."""
    kept = [layer for index, layer in enumerate(lm.layers) if index not in skip]
    return weights(*kept, lm.head) / weights(*lm.layers, lm.head)


def write(subset: LayerSubset, file: Path) -> None:
    """Write the file that `read` and `found` read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(subset), indent=2) + "\n")


def found(path: str) -> LayerSubset:
    """Errors: `AdapterNotFound`, `CorruptFile`."""
    try:
        return LayerSubset(**json.loads(located(path).read_text()))
    except FileNotFoundError as error:
        raise AdapterNotFound(
            f"no subset of layers at '{path}': search one ({_search(path)}), or pass "
            "drafter.skip=[...]."
        ) from error
    except (ValueError, TypeError) as error:
        raise CorruptFile(
            f"'{path}' is no subset of layers ({error}); search one again: {_search(path)}"
        ) from error


def _search(path: str) -> str:
    """The command that makes a file."""
    model = Path(path).name.removesuffix("-draft_verify.json")
    return command_line("prepare layers", **options_of(model), output=path)


def read(path: str, lm: TargetModel) -> LayerSubset:
    """Errors: those of `found`, and `AdapterMismatch` where it was searched for another target."""
    subset = found(path)
    if subset.target_hash != target_hash(lm):
        raise AdapterMismatch(
            f"'{path}' was searched for {subset.target} (config {subset.target_hash}); this target "
            f"is {lm.name} (config {target_hash(lm)}). Search one for it: "
            f"{command_line('prepare layers', **options_of(lm.name))}"
        )
    return subset
