"""Vanilla decoding: the drafter that proposes nothing, so that every step writes one token."""

from dataclasses import dataclass

from kangaroo.drafters.base import Drafter, DrafterConfig
from kangaroo.engine.batch import Batch
from kangaroo.engine.tree import Draft
from kangaroo.models.target import TargetModel


@dataclass
class VanillaConfig(DrafterConfig):
    """Vanilla decoding has no options."""

    name: str = "vanilla"

    def build(self, lm: TargetModel) -> Drafter:
        return Vanilla()


class Vanilla(Drafter):
    """Proposes nothing."""

    max_nodes = 0

    def propose(self, batch: Batch) -> Draft:
        return Draft.nothing(batch.last(1))
