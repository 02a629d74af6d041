"""SWIFT: attention and feed-forward parts are skipped, other ones from one round to the next.

Shapes: M positions of a text, R rows, T tokens a row, D hidden size.
"""

import random
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kangaroo.drafters import layer_search
from kangaroo.drafters.autoregressive import Choice, LayerChoice
from kangaroo.drafters.base import ChainConfig, Drafter
from kangaroo.drafters.layer_search import Subset
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, KVCache
from kangaroo.engine.sampling import pick
from kangaroo.models.layer_weights import layer_weights
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Chance, CountOrZero, DraftSize, Seed, Share

FEED_FORWARD = "feed_forward_norm", "gate", "up", "down"  # weights
LEAST_JUDGED = 8  # written tokens that a set is judged by at least


@dataclass
class SwiftConfig(ChainConfig):
    """SWIFT (arXiv 2410.06916): before a round another set of skipped parts is tried on the last
    tokens that were written, in one pass, and taken where it is better than the one at hand.

    In the paper a set is random and of a fixed size, or every 25th time from Bayesian optimisation,
    and its matchness alone decides; here it is a neighbour of the best one so far, of any size, and
    the speedup decides that its matchness lets expect. Here each text begins the search anew, so
    that it is the same whatever came before, and drafts are chains, without further candidates.

    Args:
        skip_share: of the attention and feed-forward parts, that a text begins without (the paper's
            r): evenly spaced, without the first and the last layer's.
        window: written tokens that a set is tried on (gamma); from 8 on it is those there are.
        proposals: sets that are tried in a text (S), the first of them that it begins with.
        goal: the matchness that ends the search.
        seed: of the sets that are tried.
    """

    name: str = "swift"
    skip_share: Share = 0.45
    window: DraftSize = 32
    proposals: CountOrZero = 32
    goal: Chance = 0.95
    seed: Seed = 0

    def build(self, lm: TargetModel) -> Drafter:
        return Swift(lm, self)


@dataclass(kw_only=True)
class Search(Choice):
    """`skip` is the best set so far."""

    prompt: int  # tokens
    left: int  # sets that may still be tried
    rng: random.Random
    speedup: float = 0.0  # that is expected of the best set
    tried: set[Subset] = field(default_factory=set)


class Swift(LayerChoice):
    def __init__(self, lm: TargetModel, options: SwiftConfig):
        halves, self.options = HalfLayers(lm), options
        first = evenly(range(2, halves.n_layers - 2), options.skip_share, halves.n_layers)
        super().__init__(lm, halves, first, options, options.window)

    def start(self, row: int, text: list[int]) -> Search:
        rng, left = random.Random(self.options.seed), self.options.proposals
        return Search(skip=self.first, prompt=len(text) - 1, left=left, rng=rng)

    def improve(self, batch: Batch, choices: dict[int, Any]) -> None:
        layers = self.cut.n_layers
        for row, search in choices.items():
            count = min(len(batch.texts[row]) - search.prompt, self.options.window)
            if not search.left or count < LEAST_JUDGED:
                continue
            subset, search.left = search.skip, search.left - 1
            if search.tried:
                subset = layer_search.neighbour(subset, layers, search.rng)
            if subset in search.tried:
                continue
            search.tried.add(subset)
            matchness = self.matchness(batch, row, subset, count)
            cost = self.cost_without(subset)
            speedup = layer_search.expected_speedup(matchness, cost, self.steps)
            if speedup >= search.speedup:
                search.skip, search.speedup = subset, speedup
                search.left *= matchness < self.options.goal

    def matchness(self, batch: Batch, row: int, skip: Subset, count: int) -> float:
        """The share of a row's last `count` tokens that would have been right as first drafts."""
        lm, text, of_row = self.lm, batch.texts[row], slice(row, row + 1)
        base_1, at = batch.base_B[of_row], torch.arange(-count, 0, device=lm.device)
        place = base_1[:, None] + at, base_1, len(text) - 1 + count, batch.n_slots
        meta = replace(layer_search.first_drafts(lm, *place), rows=of_row, recordable=False)
        x_1MD = lm.embed(torch.tensor([text[-count - 1 : -1]], device=lm.device))
        for layers in layer_search.runs(skip, self.cut.n_layers):
            x_1MD, _ = self.cut.run(x_1MD, batch.cache, meta, layers)
        how = batch.sampling.reading(batch.settings_B3[of_row])
        drafted_1M = pick(lm.logits(x_1MD), place[0] + 1, how, batch.seeds_B[of_row])
        pairs = zip(drafted_1M[0].tolist(), text[-count:], strict=True)  # a sync
        return sum(drafted == token for drafted, token in pairs) / count


def evenly(places: range, share: float, of: int) -> Subset:
    """So many of the places, that share of `of` or all, with even gaps."""
    count = min(round(share * of), len(places))
    return tuple(places[int((i + 0.5) * len(places) / count)] for i in range(count))


class HalfLayers(TargetModel):
    """The same model with the same weights, of twice as many layers: of each its attention, then
    its feed-forward part. It runs on the target's cache, as fast as the target."""

    def __init__(self, lm: TargetModel):
        super().__init__(lm.hf)
        names = "mlp", "self_attn"  # what is left out of a half
        self.layers = nn.ModuleList(without(layer, name) for layer in lm.layers for name in names)
        self.layer_devices = [device for device in lm.layer_devices for _ in range(2)]
        self.windowed = [windowed for windowed in lm.windowed for _ in range(2)]
        self.acceleration = lm.acceleration
        if lm.fast_layers:
            parts = [half for layer in lm.layers for half in halves(layer_weights(layer))]
            self.fast_layers = HalfStack(lm.acceleration.part("Stack", parts))


class Nothing(nn.Module):
    """Stands where a part is left out, and adds nothing."""

    def __init__(self, name: str):
        super().__init__()
        self.is_attention = name == "self_attn"

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.is_attention else zeros


def without(layer: nn.Module, name: str) -> nn.Module:
    """The layer without that part; the others are shared, and it stays as it was."""
    half = copy(layer)
    half._modules = layer._modules | {name: Nothing(name)}
    return half


def halves(layer: Any) -> list[Any]:
    """The `LayerWeights` of its attention alone, and of its feed-forward part alone."""
    others = vars(layer).keys() - set(FEED_FORWARD)
    return [replace(layer, **dict.fromkeys(names)) for names in (FEED_FORWARD, others)]


class HalfStack:
    """A stack of half layers on a cache of whole ones."""

    def __init__(self, stack: Any):
        self.stack, self.takes = stack, stack.takes

    def __call__(self, x_RTD: Tensor, cache: KVCache, meta: ForwardMeta, layers: range) -> Tensor:
        return self.stack(x_RTD, Doubled(cache), meta, layers)


class Doubled(KVCache):
    """The same memory, where each layer's keys and values have two numbers."""

    def __init__(self, cache: KVCache):
        self.n_slots = cache.n_slots
        self.keys = [keys for keys in cache.keys for _ in range(2)]
        self.values = [values for values in cache.values for _ in range(2)]
