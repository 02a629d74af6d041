"""Kangaroo: shallow layers and a small adapter draft a chain until confidence falls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kangaroo.drafters.early_exit import EarlyExitConfig
from kangaroo.drafters.layer_chain import LayerChain
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import LM


@dataclass
class KangarooConfig(EarlyExitConfig):
    """Chain drafting with early stopping (arXiv 2404.18911, sections 3.1 and 3.2); confidence is
    the top-1 probability.
    """

    name: str = "kangaroo"

    def of(self, lm: LM, trained: Any, heads: list[DraftHead]) -> Kangaroo:
        return Kangaroo(lm, trained, self.steps, self.threshold, heads[0])


class Kangaroo(LayerChain):
    """Drafts by an adapter at the exit layer."""
