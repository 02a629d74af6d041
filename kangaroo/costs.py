"""What a verification takes by its number of tokens, measured once on the machine that decodes.

A pass over a few tokens takes the time of reading the weights, so further tokens are nearly free;
from some width on arithmetic takes the time. Where that is depends on the processor, and on a
virtual machine on its neighbours: memory may be half again as fast a minute later, and hides less
arithmetic then. Decisions are made as if half of what is hidden showed (docs/methods.md).

Shapes: N tokens of a pass.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch

from kangaroo.cache import BUCKET
from kangaroo.folders import cache_folder
from kangaroo.model import LM
from kangaroo.native import build_name
from kangaroo.tree import Tree

WIDTHS = [1, 2, 4, 8, 12, 16, 32, 64, 128]
CONTEXT = 256
REPEATS, MOST_SECONDS = 30, 0.5  # passes of a width, unless these take longer


@dataclass(frozen=True)
class VerifyCosts:
    """Seconds of a pass of the whole target, by its tokens.

    Args:
        widths: ascending.
        seconds: of each width; never fewer than of a smaller one.
    """

    widths: list[int]
    seconds: list[float]

    def at(self, tokens: int) -> float:
        """By straight lines between the widths that were measured, and beyond the last two."""
        known = list(pairwise(zip(self.widths, self.seconds, strict=True)))
        part = next((part for part in known if tokens <= part[1][0]), known[-1])
        (low, below), (high, above) = part
        return below + (above - below) * (tokens - low) / (high - low)

    def expected(self, tokens: int) -> float:
        """Halfway between what was measured and the same if memory hid no arithmetic."""
        first, last = self.widths[-2:]
        of_token = (self.at(last) - self.at(first)) / (last - first)
        unhidden = self.at(1) + (tokens - 1) * of_token
        return (self.at(tokens) + max(self.at(tokens), unhidden)) / 2

    def curve(self, rows: int, nodes: int) -> list[float]:
        """Of verifying 0 to `nodes` nodes in each of so many rows, in steps without any."""
        none = self.expected(rows)
        return [self.expected(rows * (1 + n)) / none for n in range(nodes + 1)]


_known: WeakKeyDictionary[LM, VerifyCosts] = WeakKeyDictionary()


def measured(lm: LM) -> VerifyCosts:
    """Of this target with the threads that torch has now; kept in the cache folder."""
    if lm not in _known:
        about = [lm.config.to_json_string(), str(lm.dtype), torch.get_num_threads(), build_name()]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        file = cache_folder() / "costs" / f"{key}.json"
        try:
            _known[lm] = VerifyCosts(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):  # not there yet, or not whole
            _known[lm] = measure(lm)
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}")  # renamed when whole
            partial.write_text(json.dumps(asdict(_known[lm])))
            os.replace(partial, file)
    return _known[lm]


@torch.inference_mode()
def measure(lm: LM) -> VerifyCosts:
    """The fastest pass of each width, the widths in turn."""
    start = min(CONTEXT, lm.context // 2)
    widths = [width for width in WIDTHS if start + width <= lm.context]
    cache = lm.new_cache(1, start + widths[-1] + BUCKET)
    best = dict.fromkeys(widths, float("inf"))
    spent = dict.fromkeys(widths, 0.0)
    for _ in range(REPEATS):
        for width in widths:
            if spent[width] > MOST_SECONDS:
                continue
            tokens_1N = torch.zeros(1, width, dtype=torch.long)
            tree, end = Tree.chain(width, lm.device), start + width
            block = lm.block(tree, torch.tensor([start]), end, cache.n_slots)
            began = time.perf_counter()
            x_1ND, _ = lm.run(lm.embed(tokens_1N), cache, block, range(lm.n_layers))
            lm.logits(x_1ND).argmax(-1)
            took = time.perf_counter() - began
            best[width], spent[width] = min(best[width], took), spent[width] + took
    seconds = [best[width] for width in widths]
    return VerifyCosts(widths, [max(seconds[: i + 1]) for i in range(len(seconds))])
