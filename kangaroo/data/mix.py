"""Several finished datasets as one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.data.filters import FilterConfig
from kangaroo.data.making import finish
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Ranged, Seed
from kangaroo.utils.ranks import Ranks


@dataclass
class MixConfig(Ranged):
    """What is mixed.

    Args:
        path: folder of the new dataset.
        paths: folders of finished datasets. The target's distributions are kept where all have
            equally many likeliest tokens of the same model's.
        seed: seed of the order. The parts are shuffled, since the last conversations are held out.
        filters: applied again, since a question of one part may come again in another.
    """

    name: str = "mix"
    path: str = "???"
    paths: list[str] = field(default_factory=list)
    seed: Seed = 0
    filters: FilterConfig = field(default_factory=FilterConfig)

    def make(
        self, lm: TargetModel, tokenizer: PreTrainedTokenizerBase, ranks: Ranks | None = None
    ) -> None:
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
        kept, *others = (about.get("teacher") for _, about in parts)
        if any(other != kept for other in others):
            kept = None
            for sample in samples:
                sample.pop("teacher", None)
        random.Random(self.seed).shuffle(samples)
        model = kept and kept["model"]
        finish(path, settings, samples, len(samples), Counter(), self.filters, model)
