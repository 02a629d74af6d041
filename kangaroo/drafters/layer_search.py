"""Which of a target's layers a draft may skip: a search by how often it then agrees, and its file.

Shapes: B rows, T tokens of a conversation, M assistant positions, D hidden size, E occupied slots.
"""

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kangaroo.engine.cache import ForwardMeta, KVCache
from kangaroo.engine.clock import running
from kangaroo.heads.adapter_files import target_hash
from kangaroo.models.loading import options_of
from kangaroo.models.prompts import Sample
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile
from kangaroo.utils.folders import command_line, resolve_path, write_json
from kangaroo.utils.memory import weight_bytes
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranges import Count, DraftSize, Ranged, Seed

Subset = tuple[int, ...]  # the layers that are skipped, ascending


@dataclass
class SearchConfig(Ranged):
    """How much is tried, and on what.

    Args:
        budget: subsets that are tried.
        conversations: at the end of the data.
        max_length: tokens of each.
        steps: the longest draft that is thought of.
        seed: of the order in which subsets are tried.
    """

    budget: Count = 200
    conversations: Count = 8
    max_length: Count = 512
    steps: DraftSize = 6
    seed: Seed = 0


@dataclass
class JudgedText:
    """A conversation in the whole target's cache, and what it says at the assistant's positions."""

    tokens_1M: Tensor
    top_M: Tensor
    cache: KVCache
    meta: ForwardMeta


@dataclass
class LayerSubset:
    """What a search found: layers to skip, counted from 0; the target, as of an adapter's config;
    and the search's settings, results and provenance."""

    skip: list[int]
    target: str
    target_hash: str
    search: dict[str, Any] = field(default_factory=dict)


def runs(skip: Collection[int], n_layers: int) -> list[range]:
    """The layers that are left, as ranges."""
    groups = groupby(range(n_layers), lambda layer: layer not in skip)
    kept = [list(layers) for is_kept, layers in groups if is_kept]
    return [range(layers[0], layers[-1] + 1) for layers in kept]


def draft_cost(lm: TargetModel, skip: Collection[int]) -> float:
    """Weights that a draft token reads, as a share of a token's."""
    kept = [layer for index, layer in enumerate(lm.layers) if index not in skip]
    return weight_bytes(*kept, lm.head) / weight_bytes(*lm.layers, lm.head)


def found(path: str) -> LayerSubset:
    """What a search wrote. Errors: `AdapterNotFound`, `CorruptFile`."""
    model = Path(path).name.removesuffix("-draft_verify.json")
    way = command_line("prepare layers", **options_of(model), output=path)
    try:
        return LayerSubset(**json.loads(resolve_path(path).read_text()))
    except FileNotFoundError as error:
        raise AdapterNotFound(
            f"no subset of layers at '{path}': search one ({way}), or pass drafter.skip=[...]."
        ) from error
    except (ValueError, TypeError) as error:
        raise CorruptFile(
            f"'{path}' is no subset of layers ({error}); search one again: {way}"
        ) from error


def read(path: str, lm: TargetModel) -> LayerSubset:
    """Errors: those of `found`, and `AdapterMismatch` where it was searched for another target."""
    subset = found(path)
    if subset.target_hash != target_hash(lm):
        raise AdapterMismatch(
            f"'{path}' was searched for {subset.target} (config {subset.target_hash}); this target "
            f"is {lm.name} (config {target_hash(lm)}). Search one for it: "
            f"{command_line('prepare layers', **options_of(lm.name))}"
        )
    return subset


def search(
    lm: TargetModel, samples: Sequence[Sample], config: SearchConfig, file: Path
) -> LayerSubset:
    """The subset with the best expected speedup among `budget` that a local search tries, written
    to a file.

    A change of one layer, or an exchange of two, is kept unless it is worse. Errors: `ConfigError`.
    """
    if lm.n_layers < 2:
        raise ConfigError(f"the target must have 2 layers or more, not {lm.n_layers}.")
    started = running()
    texts = [look(lm, sample, config.max_length) for sample in samples[-config.conversations :]]
    rng = random.Random(config.seed)
    budget = min(config.budget, 2**lm.n_layers - 2)  # all subsets but none and all
    best = subset = tuple(range(1, lm.n_layers - 1, 2)) or (0,)  # every other layer
    speedup = agreement = 0.0
    seen: set[Subset] = set()
    bar = tqdm(total=budget, unit="subset", desc="searching")
    while True:
        seen.add(subset)
        right = agreement_of(lm, texts, subset)
        expected = expected_speedup(right, draft_cost(lm, subset), config.steps)
        if expected >= speedup:
            best, agreement, speedup = subset, right, expected
        bar.update()
        bar.set_postfix(speedup=f"{speedup:.3f}", agreement=f"{agreement:.3f}")
        if len(seen) == budget:
            break
        subset = best
        while subset in seen:  # where all that is near is known, the walk leads further
            subset = neighbour(subset, lm.n_layers, rng)
    bar.close()
    about = {
        "agreement": agreement,
        "expected_speedup": speedup,
        "draft_cost": draft_cost(lm, best),
        "positions": sum(len(text.top_M) for text in texts),
        "seconds": running() - started,
        "settings": asdict(config),
    } | provenance()
    winner = LayerSubset(list(best), lm.name, target_hash(lm), about)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, asdict(winner))
    return winner


def neighbour(subset: Subset, n_layers: int, rng: random.Random) -> Subset:
    """Another subset: one layer more or less, or one for another."""
    skipped = set(subset)
    layer = rng.randrange(n_layers)
    skipped ^= {layer}
    if rng.random() < 0.5:
        skipped ^= {rng.randrange(n_layers)}
    return tuple(sorted(skipped)) if 0 < len(skipped) < n_layers else subset


def expected_speedup(agreement: float, cost: float, steps: int) -> float:
    """With the best number of draft tokens up to `steps`, if each agrees by itself (Leviathan et
    al. 2023, theorem 3.8)."""
    return max(
        sum(agreement**k for k in range(gamma + 1)) / (gamma * cost + 1)
        for gamma in range(1, steps + 1)
    )


@torch.no_grad()
def look(lm: TargetModel, sample: Sample, max_length: int) -> JudgedText:
    """The whole target's pass over a conversation, and where its tokens go once more, as drafts."""
    tokens_1T = torch.tensor([sample["input_ids"][:max_length]], device=lm.device)
    length = tokens_1T.shape[1]
    wanted_M = torch.tensor(sample["loss_mask"][1:length], device=lm.device).nonzero()[:, 0]
    count = len(wanted_M)
    cache = lm.new_cache(1, length + count)
    meta = lm.chunk(0, length, row=0, n_slots=length + count)
    x_1TD, _ = lm.run(lm.embed(tokens_1T), cache, meta, range(lm.n_layers))
    top_M = lm.logits(x_1TD[:, wanted_M]).argmax(-1)[0]
    start_1 = torch.tensor([length], device=lm.device)
    drafts = first_drafts(lm, wanted_M[None], start_1, cache.n_slots, cache.n_slots)
    return JudgedText(tokens_1T[:, wanted_M], top_M, cache, drafts)


def first_drafts(
    lm: TargetModel, positions_BM: Tensor, start_B: Tensor, used: int, n_slots: int
) -> ForwardMeta:
    """A block of a text's tokens once more, at free slots from `start` on and below `used`, as if
    each were the first to be drafted: it sees the keys of the text before it, and its own."""
    slots_BM = start_B[:, None] + torch.arange(positions_BM.shape[1], device=start_B.device)
    slots_E = torch.arange(lm.extent(n_slots, used), device=start_B.device)
    hidden_BME = (slots_E >= positions_BM[..., None]) & (slots_E != slots_BM[..., None])
    return lm.forward_meta_of(slots_BM, positions_BM, hidden_BME, n_slots)


@torch.no_grad()
def agreement_of(lm: TargetModel, texts: Sequence[JudgedText], skip: Subset) -> float:
    """How often the first draft token is the target's choice."""
    right = total = 0
    for text in texts:
        x_1MD = lm.embed(text.tokens_1M)
        for layers in runs(skip, lm.n_layers):
            x_1MD, _ = lm.run(x_1MD, text.cache, text.meta, layers)
        right += int((lm.logits(x_1MD).argmax(-1)[0] == text.top_M).sum())
        total += len(text.top_M)
    return right / total
