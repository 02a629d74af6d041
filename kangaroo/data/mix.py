"""Several finished datasets as one."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from kangaroo.data import store
from kangaroo.data.filters import FilterConfig
from kangaroo.data.making import finish
from kangaroo.engine import topk_logits
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Ranged, Seed
from kangaroo.utils.ranks import Ranks

log = logging.getLogger(__name__)


@dataclass
class MixConfig(Ranged):
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
        wrote = _alike([about.get("teacher") for _, about in parts], samples)
        random.Random(self.seed).shuffle(samples)
        finish(path, settings, samples, len(samples), Counter(), self.filters, wrote)


def _alike(stored: Sequence[dict[str, Any] | None], samples: Sequence[Sample]) -> str | None:
    """Make the records of the target's distributions alike in all samples: as many likeliest tokens
    as the part with the fewest has, and none where a part has none, or another model's.

    Returns the model that they are of.
    """
    models = [about["model"] if about else None for about in stored]
    if len(set(models)) > 1 or None in models:
        for sample in samples:
            sample.pop("teacher", None)
        if any(models):
            log.warning("the mix has no kept distributions: those of its parts are of %s", models)
        return None
    fewest = min(about["likeliest"] for about in stored if about)
    for sample in samples:
        sample["teacher"] = topk_logits.first(sample["teacher"], fewest)
    return models[0]
