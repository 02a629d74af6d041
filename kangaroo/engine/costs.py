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
from dataclasses import asdict
from weakref import WeakKeyDictionary

import torch

from kangaroo.cpu.native import build_name
from kangaroo.engine.budget import VerifyCosts
from kangaroo.engine.cache import BUCKET
from kangaroo.engine.clock import now
from kangaroo.engine.tree import Tree
from kangaroo.models.target import LM
from kangaroo.utils.folders import cache_folder

WIDTHS = [1, 2, 4, 8, 12, 16, 32, 64, 128]
CONTEXT = 256
REPEATS, MOST_SECONDS = 30, 0.5  # passes of a width, unless these take longer


_known: WeakKeyDictionary[LM, VerifyCosts] = WeakKeyDictionary()


def measured(lm: LM) -> VerifyCosts:
    """Of this target on its device, with torch's threads of now; kept in the cache folder."""
    if lm not in _known:
        about = [lm.config.to_json_string(), str(lm.dtype), *machine(lm)]
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


def machine(lm: LM) -> list[str | int]:
    """What computes a pass of this target."""
    if lm.device.type == "cuda":
        return [torch.cuda.get_device_name(lm.device), "graphs" if lm.acceleration else "eager"]
    native = lm.native_layers is not None
    return [torch.get_num_threads(), build_name() if native else "torch " + torch.__version__]


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
            tokens_1N = torch.zeros(1, width, dtype=torch.long, device=lm.device)
            tree, end = Tree.chain(width, lm.device), start + width
            block = lm.block(tree, torch.tensor([start], device=lm.device), end, cache.n_slots)
            began = now(lm.device)
            x_1ND, _ = lm.run(lm.embed(tokens_1N), cache, block, range(lm.n_layers))
            _ = lm.choose(x_1ND) or lm.logits(x_1ND).argmax(-1)
            took = now(lm.device) - began
            best[width], spent[width] = min(best[width], took), spent[width] + took
    seconds = [best[width] for width in widths]
    return VerifyCosts(widths, [max(seconds[: i + 1]) for i in range(len(seconds))])
