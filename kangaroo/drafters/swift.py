"""SWIFT: drafts skip attention and feed-forward parts that a search chooses while decoding.

Shapes: M positions of a text, R rows, T tokens a row, D hidden size.
"""

import random
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kangaroo.drafters.autoregressive import Choice, LayerChoice
from kangaroo.drafters.base import ChainConfig, Drafter
from kangaroo.drafters.layer_search import Subset, expected_speedup, first_drafts, neighbour, runs
from kangaroo.engine.backend import Layers, LayerWeights, Matrix
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import KVCache
from kangaroo.engine.sampling import pick
from kangaroo.models.layer_weights import layer_weights
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Chance, CountOrZero, DraftSize, Seed, Share

FEED_FORWARD = "feed_forward_norm", "gate", "up", "down"  # the weights of this part
MIN_TOKENS = 8  # generated tokens needed to try a set


@dataclass
class SwiftConfig(ChainConfig):
    """SWIFT (arXiv 2410.06916): before a round another set of skipped parts is tried on the last
    generated tokens, in one pass, and replaces the current set if it is better.

    The paper tries random sets of a fixed size, and every 25th time one from Bayesian optimisation;
    the share of matching tokens decides. Here a set is a neighbour of the best one so far, of any
    size, and the expected speedup decides. Each text has its own search, so that its drafts do not
    depend on earlier texts. Drafts are chains without further candidates.

    Args:
        skip_share: the share of attention and feed-forward parts that are skipped at first (the
            paper's r), evenly spaced, none in the first and the last layer.
        window: generated tokens on which a set is tried (gamma); early in a text fewer, 8 at least.
        proposals: how many sets are tried in a text (S), the first one included.
        goal: the share of matching tokens that ends the search.
        seed: the seed of the sets that are tried.
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
    """The search of a text; `skip` is the best set so far."""

    prompt_tokens: int
    proposals_left: int
    rng: random.Random
    speedup: float = 0.0  # expected with `skip`
    tried: set[Subset] = field(default_factory=set)


class Swift(LayerChoice):
    """Numbers the parts of layers like layers: two for each layer, attention first."""

    def __init__(self, lm: TargetModel, options: SwiftConfig):
        halves = HalfLayers(lm)
        self.options = options
        first = evenly(range(2, halves.n_layers - 2), options.skip_share, halves.n_layers)
        super().__init__(lm, halves, first, options)
        self.max_nodes = max(self.steps, options.window)

    def start(self, row: int, text: list[int]) -> Search:
        return Search(
            self.first,
            prompt_tokens=len(text) - 1,
            proposals_left=self.options.proposals,
            rng=random.Random(self.options.seed),
        )

    def improve(self, batch: Batch, choices: dict[int, Any]) -> None:
        for row, search in choices.items():
            count = min(len(batch.texts[row]) - search.prompt_tokens, self.options.window)
            if not search.proposals_left or count < MIN_TOKENS:
                continue
            subset = search.skip
            search.proposals_left -= 1
            if search.tried:
                subset = neighbour(subset, self.layered.n_layers, search.rng)
            if subset in search.tried:
                continue
            search.tried.add(subset)
            matchness = self.matchness(batch, row, subset, count)
            speedup = expected_speedup(matchness, self.cost_without(subset), self.steps)
            if speedup >= search.speedup:
                search.skip = subset
                search.speedup = speedup
                search.proposals_left *= matchness < self.options.goal

    def matchness(self, batch: Batch, row: int, skip: Subset, count: int) -> float:
        """The share of a row's last `count` tokens that a draft of one token would have matched."""
        lm = self.lm
        text = batch.texts[row]
        rows = slice(row, row + 1)
        base_1 = batch.base_B[rows]
        positions_1M = base_1[:, None] + torch.arange(-count, 0, device=lm.device)
        used = len(text) - 1 + count
        meta = first_drafts(lm, positions_1M, base_1, used=used, n_slots=batch.n_slots)
        meta = replace(meta, rows=rows, recordable=False)
        x_1MD = lm.embed(torch.tensor([text[-count - 1 : -1]], device=lm.device))
        for layers in runs(skip, self.layered.n_layers):
            x_1MD, _ = self.layered.run(x_1MD, batch.cache, meta, layers)
        sampling = batch.sampling.reading(batch.settings_B3[rows])
        drafted_1M = pick(lm.logits(x_1MD), positions_1M + 1, sampling, batch.seeds_B[rows])
        pairs = zip(drafted_1M[0].tolist(), text[-count:], strict=True)  # a sync
        return sum(drafted == token for drafted, token in pairs) / count


def evenly(layers: range, share: float, total: int) -> Subset:
    """Evenly spaced layers of these: as many as this share of `total`, or all."""
    count = min(round(share * total), len(layers))
    return tuple(layers[int((i + 0.5) * len(layers) / count)] for i in range(count))


class HalfLayers(TargetModel):
    """The same model and weights as twice as many layers, each an attention or a feed-forward part.
    It runs on the target's cache."""

    def __init__(self, lm: TargetModel):
        super().__init__(lm.hf)
        removed = "mlp", "self_attn"  # from the first and the second half of a layer
        self.layers = nn.ModuleList(without(layer, name) for layer in lm.layers for name in removed)
        self.layer_devices = [device for device in lm.layer_devices for _ in range(2)]
        self.windowed = [windowed for windowed in lm.windowed for _ in range(2)]
        self.backend = lm.backend
        if lm.fast_layers:
            parts = [half for layer in lm.layers for half in halves(layer_weights(layer))]
            stack = lm.backend.layers(parts)
            self.fast_layers = stack and HalfStack(stack)


class Nothing(nn.Module):
    """Takes the place of a removed part, and adds zeros."""

    def __init__(self, name: str):
        super().__init__()
        self.is_attention = name == "self_attn"

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.is_attention else zeros


def without(layer: nn.Module, name: str) -> nn.Module:
    """A copy of the layer without the part of this name, which shares all others."""
    half = copy(layer)
    half._modules = layer._modules | {name: Nothing(name)}
    return half


def halves(layer: LayerWeights[Matrix]) -> list[LayerWeights[Matrix]]:
    """A layer's weights of the attention alone, and of the feed-forward part alone."""
    others = vars(layer).keys() - set(FEED_FORWARD)
    return [replace(layer, **dict.fromkeys(names)) for names in (FEED_FORWARD, others)]


class HalfStack:
    """Half layers on a cache of whole layers, whose keys and values each have two numbers."""

    def __init__(self, stack: Layers):
        self.stack = stack
        self.takes = stack.takes
        self.prompt_chunk = stack.prompt_chunk

    def __call__(
        self, x_RTD: Tensor, cache: KVCache | None, *inputs: Any, **options: Any
    ) -> Tensor:
        assert cache is not None
        keys = [keys for keys in cache.keys for _ in range(2)]
        values = [values for values in cache.values for _ in range(2)]
        halves = KVCache(cache.batch_size, cache.n_slots, keys, values)
        return self.stack(x_RTD, halves, *inputs, **options)
