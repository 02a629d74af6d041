"""Draft & Verify: the target itself drafts, and skips some of its layers."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kangaroo.drafters import layer_search
from kangaroo.drafters.autoregressive import Autoregressive
from kangaroo.drafters.base import ChainConfig, Drafter
from kangaroo.models.loading import model_options
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import command_line
from kangaroo.utils.ranges import CountOrZero


@dataclass
class DraftVerifyConfig(ChainConfig):
    """Draft & Verify (Zhang et al. 2024, arXiv 2309.08168), skipping whole layers.

    Args:
        subset: the file with the layers to skip that `scripts/prepare.py layers` wrote.
        skip: the layers to skip, counted from 0, instead of `subset`.
    """

    name: str = "draft_verify"
    subset: str | None = None
    skip: list[CountOrZero] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skip is not None:
            self.subset = None

    def build(self, lm: TargetModel) -> Drafter:
        """Errors: `ConfigError`, and what `layer_search.read` raises."""
        if self.skip is None and self.subset is None:
            raise ConfigError(
                "drafter=draft_verify needs drafter.skip=[...], or drafter.subset= the file that "
                f"{command_line('prepare layers', **model_options(lm.name))} writes."
            )
        skip = layer_search.read(self.subset, lm).skip if self.subset else self.skip or []
        return DraftVerify(lm, skip, self.steps, self.threshold)

    def settings(self) -> dict[str, Any]:
        skip = self.skip if self.subset is None else layer_search.read(self.subset).skip
        return super().settings() | {"skip": skip}


class DraftVerify(Autoregressive):
    """Skips the same layers in all rows."""

    def __init__(
        self, lm: TargetModel, skip: Collection[int], steps: int = 6, threshold: float | str = 0.6
    ):
        if not set(skip) < set(range(lm.n_layers)):
            raise ConfigError(
                f"drafter.skip={sorted(skip)} must be some, and not all, of the target's layers 0 "
                f"to {lm.n_layers - 1}."
            )
        super().__init__(lm, steps, threshold, window=0)
        self.runs = [(layers, None) for layers in layer_search.runs(skip, lm.n_layers)]
        self.draft_cost = layer_search.draft_cost(lm, skip)
