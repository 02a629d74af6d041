"""Run a chunk of a prompt through the target.

Shapes: T tokens of the chunk, W tokens of a recorded one, D hidden size.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.engine.cache import Chunk, ForwardMeta, KVCache, Taps, power_of_two
from kangaroo.models.target import TargetModel

MIN_CHUNK = 16  # tokens of the shortest recorded chunk


def read(
    lm: TargetModel, tokens_1T: Tensor, start: int, cache: KVCache, row: int, taps: Collection[int]
) -> tuple[Tensor, Chunk]:
    """Read tokens of one row at positions from `start` on. Returns the output of the last layer for
    the last token, `[1, 1, D]`, and the chunk with the tapped states."""
    stop = start + tokens_1T.shape[1]
    meta = lm.chunk(start, stop, row, cache.n_slots)
    if lm.window is None and lm.backend.records_prompts(tokens_1T.shape[1]):
        last_11D, tapped = replay(lm, tokens_1T, start, cache=cache, row=row, taps=taps)
    else:
        ending = lm.chunk(stop - 1, stop, row, cache.n_slots)
        last_11D, tapped = run(lm, tokens_1T, cache, meta, ending=ending, taps=taps)
    return last_11D, (tokens_1T, meta, tapped)


def replay(
    lm: TargetModel, tokens_1T: Tensor, start: int, cache: KVCache, row: int, taps: Collection[int]
) -> tuple[Tensor, Taps]:
    """As `run`, by one CUDA graph for all rows and places; padding comes first, at position -1."""
    count = tokens_1T.shape[1]
    stop = start + count
    width = max(MIN_CHUNK, power_of_two(count))
    extent = lm.extent(cache.n_slots, stop)
    cos_SC, sin_SC = lm.rope_table(cache.n_slots)

    def work(tokens_1W: Tensor, place_3: Tensor) -> tuple[Tensor, list[Tensor]]:
        start_1, stop_1, row_1 = place_3.split(1)
        at_1W = torch.arange(width, device=lm.device)[None] + (stop_1 - width)
        at_1W = at_1W.masked_fill(at_1W < start_1, -1)
        rope = cos_SC[at_1W], sin_SC[at_1W]
        meta = ForwardMeta(at_1W, at_1W, None, extent, slice(0, 1), rope, row_1=row_1)
        last_11D, tapped = run(lm, tokens_1W, cache, meta, meta.narrow(width - 1, 1), taps)
        return last_11D, [tapped[tap] for tap in sorted(taps)]

    key = "prompt", lm.n_layers, width, extent, tuple(sorted(taps))
    tokens_1W = F.pad(tokens_1T, (width - count, 0))
    place_3 = torch.tensor([start, stop, row]).to(lm.device)
    last_11D, states = lm.backend.replay((cache,), key, work, tokens_1W, place_3, keep=True)
    return last_11D, {tap: x[:, -count:] for tap, x in zip(sorted(taps), states, strict=True)}


def run(
    lm: TargetModel,
    tokens_1T: Tensor,
    cache: KVCache,
    meta: ForwardMeta,
    ending: ForwardMeta,
    taps: Collection[int],
) -> tuple[Tensor, Taps]:
    """The last layer's output for the last token, whose block is `ending`, and the tapped states.
    A backend's layers compute nothing but keys and values for the other tokens in the last layer,
    unless its output is tapped."""
    x_1TD = lm.embed(tokens_1T)
    layers = lm.fast_layers
    last = lm.n_layers - 1
    if layers is None or lm.n_layers in taps or not layers.takes(x_1TD, cache, meta):
        x_1TD, tapped = lm.run(x_1TD, cache, meta, range(lm.n_layers), taps)
        return x_1TD[:, -1:], tapped
    x_1TD, tapped = lm.run(x_1TD, cache, meta, range(last), taps)
    layers(x_1TD, cache, meta, range(last, last + 1), keys_alone=True)
    return layers(x_1TD[:, -1:], cache, ending, range(last, last + 1)), tapped
