"""Several finished datasets as one."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.data.filters import FilterConfig
from kangaroo.data.making import finish
from kangaroo.model import LM
from kangaroo.ranks import Ranks


@dataclass
class MixConfig:
    """What is mixed.

    Args:
        path: folder of the new dataset.
        paths: folders of finished datasets.
        seed: seed of the order. The parts are shuffled, since the last conversations are held out.
        filters: applied again, since a question of one part may come again in another.
    """

    name: str = "mix"
    path: str = "???"
    paths: list[str] = field(default_factory=list)
    seed: int = 0
    filters: FilterConfig = field(default_factory=FilterConfig)

    def make(self, lm: LM, tokenizer: PreTrainedTokenizerBase, ranks: Ranks | None = None) -> None:
        """Write the dataset to `path`; of several processes the first does it, none waits.

        Errors: `DataError` where a part is no complete dataset.
        """
        if ranks is not None and not ranks.is_first:
            return
        parts = [store.load(Path(path)) for path in self.paths]
        settings: dict[str, Any] = asdict(self)
        del settings["path"], settings["paths"]
        settings["parts"] = [about["fingerprint"] for _, about in parts]
        path = Path(self.path)
        if store.is_of(path, settings):
            return
        samples = [sample for some, _ in parts for sample in some]
        random.Random(self.seed).shuffle(samples)
        finish(path, settings, samples, len(samples), self.filters)
