"""What a verification takes by its number of tokens, measured once on the machine that decodes; and
on a GPU what drafting takes beside it.

Where reading the weights takes the time, further tokens are nearly free. On a virtual machine that
depends on its neighbours, so decisions are made as if half of the arithmetic that memory hides
showed (docs/methods.md).

Shapes: N tokens of a pass.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kangaroo.cpu.native import build_name
from kangaroo.engine.cache import BUCKET, ForwardMeta, KVCache
from kangaroo.engine.clock import now
from kangaroo.engine.tree import Tree
from kangaroo.models.target import TargetModel
from kangaroo.utils.folders import cache_folder, write_json

log = logging.getLogger(__name__)

WIDTHS = [1, 2, 4, 8, 12, 16, 32, 64, 128]
CONTEXT = 256
REPEATS, MOST_SECONDS = 30, 0.5  # passes of a width, unless these take longer
KEPT_SECONDS = 86400.0  # then they are measured again: neighbours come and go
STEADY = 1.1  # times that a busy machine makes differ by more, and are not kept


@dataclass(frozen=True)
class VerifyCosts:
    """Seconds of a pass of the whole target by its tokens, both ascending."""

    widths: list[int]
    seconds: list[float]

    def at(self, tokens: int) -> float:
        """By straight lines between the widths that were measured, and beyond the last two."""
        parts = list(pairwise(zip(self.widths, self.seconds, strict=True)))
        part = next((part for part in parts if tokens <= part[1][0]), parts[-1])
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


_known: WeakKeyDictionary[TargetModel, VerifyCosts] = WeakKeyDictionary()
_drafting: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


def measured(lm: TargetModel) -> VerifyCosts:
    """Of this target on its device, with torch's threads of now; kept for a day in the cache
    folder, unless the machine was busy."""
    if lm not in _known:
        about = [lm.config.to_json_string(), str(lm.dtype), *machine(lm)]
        key = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        file = cache_folder() / "costs" / f"{key}.json"
        with suppress(OSError, ValueError, TypeError):  # it is not there, or not whole
            if time.time() - file.stat().st_mtime < KEPT_SECONDS:
                _known[lm] = VerifyCosts(**json.loads(file.read_text()))
    if lm not in _known:
        _known[lm], is_steady = measure(lm)
        if not is_steady:
            log.info("the machine is busy: verification is measured again in the next process")
            return _known[lm]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, asdict(_known[lm]))
        except OSError as error:
            log.warning("verification is measured again in the next process: %s", error)
    return _known[lm]


def machine(lm: TargetModel) -> list[str | int]:
    """What computes a pass of this target."""
    if lm.device.type == "cuda":
        by = "eager" if not lm.acceleration else "kernels" if lm.acceleration.kernels else "graphs"
        return [torch.cuda.get_device_name(lm.device), by]
    native = lm.acceleration.library is not None
    return [torch.get_num_threads(), build_name() if native else "torch " + torch.__version__]


def measure(lm: TargetModel) -> tuple[VerifyCosts, bool]:
    """The fastest pass of each width; and whether the machine was steady meanwhile."""
    widths = [width for width in WIDTHS if context(lm) + width <= lm.context]
    passes = verifications(lm, widths, range(lm.n_layers), context(lm)).values()
    costs = VerifyCosts(widths, list(accumulate(map(min, passes), max)))
    return costs, all(map(steady, passes))


@torch.inference_mode()
def verifications(
    lm: TargetModel, widths: list[int], layers: range, length: int
) -> dict[int, list[float]]:
    """Seconds of passes of each width, ascending, through layers up to the last one, head and
    choice, after `length` tokens."""
    cache = lm.new_cache(1, length + widths[-1] + BUCKET)

    def verify(x_1ND: Tensor, meta: ForwardMeta) -> Tensor:
        x_1ND, _ = lm.run(x_1ND, cache, meta, layers)
        chosen = lm.choose(x_1ND)
        return lm.logits(x_1ND).argmax(-1) if chosen is None else chosen[0]

    return timed(lm, widths, length, (cache,), verify)


@torch.inference_mode()
def drafting(lm: TargetModel, drafter: Any) -> float:
    """A token of the chain of an `EarlyExit` drafter, in verifications of one token."""
    if drafter not in _drafting:
        cache = lm.new_cache(1, context(lm) + BUCKET)
        draft_cache = lm.new_cache(1, cache.n_slots, [lm.device] * drafter.adapter.depth)

        def draft(f_11D: Tensor, meta: ForwardMeta) -> Tensor:
            deep_11D = f_11D if drafter.reads_deep else None
            adapted_1D = drafter.adapter(f_11D, deep_11D, meta, draft_cache.at(meta))[:, 0]
            chosen, head = drafter.head.choose(adapted_1D), drafter.head
            token_11 = chosen[0] if chosen else head.token_of(head(adapted_1D).argmax(-1, True))
            return lm.run(lm.embed(token_11), cache, meta, drafter.shallow)[0]

        seconds = timed(lm, [1], context(lm), (cache, draft_cache), draft)[1]
        _drafting[drafter] = min(seconds) / measured(lm).seconds[0]
    return _drafting[drafter]


def steady(times: list[float]) -> bool:
    """Whether the fastest of the first half of passes took what the fastest of the others did."""
    half = len(times) // 2
    ends = [min(part) for part in (times[:half], times[half:]) if part]
    return max(ends) < STEADY * min(ends)


def context(lm: TargetModel) -> int:
    """The tokens before a pass that is measured."""
    return min(CONTEXT, lm.context // 2)


def timed(
    lm: TargetModel,
    widths: list[int],
    length: int,
    caches: tuple[KVCache, ...],
    work: Callable[[Tensor, ForwardMeta], Tensor],
) -> dict[int, list[float]]:
    """Seconds of the passes `work(x, meta)` of each width after `length` tokens, the widths in
    turn."""
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(REPEATS):
        for width in widths:
            if sum(seconds[width]) > MOST_SECONDS:
                continue
            tokens_1N = torch.zeros(1, width, dtype=torch.long, device=lm.device)
            tree, start_1 = Tree.chain(width, lm.device), tokens_1N[:, 0] + length
            meta = lm.forward_meta(tree, start_1, length + width, caches[0].n_slots)
            began = now(lm.device)
            lm.acceleration.replay(caches, ("cost",), work, lm.embed(tokens_1N), meta)
            seconds[width].append(now(lm.device) - began)
    return seconds
